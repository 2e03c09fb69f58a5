#!/usr/bin/env bash
# Real runs on one GPU: text -> tokens -> training of the 0.5B preset in several formats, each model
# exported and evaluated by transformers, all losses in one plot.
#
#   tools/real_runs.sh WORK TEXT_FOLDER RUN [RUN...]
#
# RUN: bf16; bf16-again, the same tokens in smaller micro-batches, which shows how far runs drift
# apart that differ in rounding only; int8; fp8, or fp8 with -delayed, -mlp, -moments, -head and one
# of -all and -forward, such as fp8-delayed-mlp-head: delayed scales, --mlp-dtype e4m3, 8-bit
# moments, the LM head in fp8, and fast accumulation in all or only in forward's products instead of
# in those of forward and of activations' gradients.
# STEPS in the environment: how many steps of 65,536 tokens, 300 if not set. LR: the highest
# learning rate, 1.5e-4 if not set. WORK gets the tokenizer, the token files, and of each RUN its
# log, console output, model and what transformers say of it; what is there is not made again. The
# text is every .py, .md and .txt file of the folder that is UTF-8. The last table has the losses
# beside the first RUN's.
set -euo pipefail
usage="usage: tools/real_runs.sh WORK TEXT_FOLDER RUN [RUN...]"
work=${1:?$usage} text=${2:?$usage}
: "${3:?$usage}"
shift 2
fp8='fp8(-delayed(-mlp)?)?(-moments)?(-head)?(-all|-forward)?'
for run in "$@"; do
    if ! [[ $run =~ ^(bf16(-again)?|int8|$fp8)$ ]]; then
        echo "error: $run: $usage" >&2 && exit 64
    fi
done
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
steps=${STEPS:-300}
mkdir -p "$work"
cd "$work"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [ ! -d data ]; then
    find "$text" -type f \( -name '*.py' -o -name '*.md' -o -name '*.txt' \) -size -2M \
        | sort >files.txt
    "$python" - <<'END'
import json

with open("files.txt") as names, open("text.jsonl", "w") as out, open("utf8.txt", "w") as good:
    for name in names.read().splitlines():
        try:
            with open(name, encoding="utf-8") as file:
                text = file.read()
        except UnicodeDecodeError:
            continue
        out.write(json.dumps({"text": text}) + "\n")
        good.write(name + "\n")
END
    shuf --random-source=utf8.txt -n 4000 utf8.txt >sample.txt
    xargs -a sample.txt -d '\n' -s 1500000 "$python" "$root/tools/train_tokenizer.py" tokenizer
    "$python" -m llmq tokenize text.jsonl \
        --tokenizer tokenizer --out data.part --eval-fraction 0.004 | tail -n 4
    mv data.part data
fi

for run in "$@"; do
    [ -e "$run-transformers.txt" ] && continue
    options=(--batch-size 32 --grad-accumulation 2)
    [[ $run == *-again ]] && options=(--batch-size 16 --grad-accumulation 4)
    moments=bf16
    [[ $run == *-moments* ]] && moments=e4m3
    [[ $run == fp8* ]] && options+=(--matmul-dtype e4m3)
    [[ $run == int8 ]] && options+=(--matmul-dtype int8)
    [[ $run == *-delayed* ]] && options+=(--fp8-recipe delayed)
    [[ $run == *-mlp* ]] && options+=(--mlp-dtype e4m3)
    [[ $run == *-head* ]] && options+=(--head-dtype e4m3)
    [[ $run == *-all ]] && options+=(--fp8-fast-accumulation all)
    [[ $run == *-forward ]] && options+=(--fp8-fast-accumulation forward)
    "$python" -m llmq train --model Qwen2.5-0.5B --from-scratch --name "$run" \
        --train-file 'data/train*.bin' --eval-file 'data/eval*.bin' --steps "$steps" \
        --lr "${LR:-1.5e-4}" --warmup $((steps / 2)) --beta-2 0.95 --final-lr-fraction 0.1 \
        --opt-m-dtype $moments --opt-v-dtype $moments --lmhead-chunks 4 --eval-num-steps 4 \
        --ckpt-interval 0 --no-save-training-state --out-dir "model-$run" --log-file "$run.json" \
        "${options[@]}" >"$run.txt"
    grep '^\[V\]' "$run.txt" | tail -n 1
    "$python" "$root/tools/eval_hf.py" "model-$run" 'data/eval*.bin' --device cuda 2>/dev/null \
        | tee "$run-part.txt"
    mv "$run-part.txt" "$run-transformers.txt"
done

"$python" -m llmq plot "${@/%/.json}" --out loss.png
"$python" - "$@" <<'END' | tee losses.txt
import json, sys

LAST = 20  # steps
print(f"{'run':21} {'evaluation':>18} {f'training, last {LAST}':>18}")
first = None
for run in sys.argv[1:]:
    with open(f"{run}.json") as file:
        records = json.load(file)
    evaluated = [r["loss"] for r in records if r["log"] == "eval"][-1]
    trained = [r["loss"] for r in records if r["log"] == "step"][-LAST:]
    losses = (evaluated, sum(trained) / len(trained))
    first = first or losses
    columns = (f"{loss:.4f} {100 * (loss / of - 1):+.2f} %" for loss, of in zip(losses, first))
    print(f"{run:21}", *(f"{column:>18}" for column in columns))
END
