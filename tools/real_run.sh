#!/usr/bin/env bash
# A real run on one GPU: text -> tokens -> training of the 0.5B preset -> export -> transformers.
#
#   tools/real_run.sh WORK TEXT_FOLDER [more options of llmq train]
#
# WORK gets the tokenizer, token files, log, curve and model. The text is every .py, .md and .txt
# file of the folder. Prints the last lines of each part.
set -euo pipefail
work=${1:?"usage: tools/real_run.sh WORK TEXT_FOLDER [options]"}
text=${2:?"usage: tools/real_run.sh WORK TEXT_FOLDER [options]"}
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
mkdir -p "$work"
cd "$work"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
find "$text" -type f \( -name '*.py' -o -name '*.md' -o -name '*.txt' \) -size -2M | sort >files.txt
shuf --random-source=files.txt -n 4000 files.txt >sample.txt
xargs -a sample.txt -d '\n' "$python" "$root/tools/train_tokenizer.py" tokenizer
"$python" -m llmq tokenize "$text" --tokenizer tokenizer --out data --eval-fraction 0.004 | tail -n 4
"$python" -m llmq train --model Qwen2.5-0.5B --from-scratch --name real \
    --train-file 'data/train*.bin' --eval-file 'data/eval*.bin' --batch-size 32 \
    --grad-accumulation 2 --steps 300 --lr 6e-4 --warmup 30 --final-lr-fraction 0.1 \
    --opt-m-dtype bf16 --opt-v-dtype bf16 --eval-num-steps 4 --ckpt-interval 0 \
    --no-save-training-state --out-dir model --log-file log.json "$@" >train.txt
grep -v '^\[T\]' train.txt | tail -n 60
grep '^\[T\]' train.txt | awk 'NR % 25 == 1'
"$python" -m llmq plot log.json --out loss.png
"$python" "$root/tools/eval_hf.py" model 'data/eval*.bin' --device cuda 2>/dev/null
