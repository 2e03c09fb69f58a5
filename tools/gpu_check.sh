#!/usr/bin/env bash
# What a change should pass on a GPU, in one call: tests, operations, whole steps, a profile.
#
#   tools/gpu_check.sh LOGS [PART ...]          all parts if none is given, in this order
#
#   tests            pytest -m gpu
#   ops[=OP]         tools/bench_ops.py, all operations or one
#   bench[=YAML]     llmq bench with benchmarks/h100/h100_bf16.yaml or another file
#   profile[=MODEL]  tools/profile_step.py, one step of two micro-steps at batch 32
#
# Everything is logged to the directory LOGS, beside the reports. A short table comes last: the exit
# status of each part, its seconds, and the lines of its log that sum it up. Exits with the number
# of parts that failed. PYTHON chooses the interpreter, TEST_ARGS adds arguments to pytest.
set -uo pipefail

logs=${1:?"usage: tools/gpu_check.sh LOGS [tests|ops|bench|profile ...]"}
shift
[ $# -gt 0 ] || set -- tests ops bench profile
for part in "$@"; do
    case ${part%%=*} in
    tests | ops | bench | profile) ;;
    *) echo "error: unknown part $part: tests, ops, bench or profile" >&2 && exit 64 ;;
    esac
done
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
table=()
failed=0

# run NAME PATTERN COMMAND...: log a part; the lines of the log like PATTERN go into the table.
run() {
    local name=$1 pattern=$2 start=$SECONDS status said
    shift 2
    echo "== $name: $*"
    "$@" >"$logs/$name.log" 2>&1
    status=$?
    [ "$status" -eq 0 ] || failed=$((failed + 1))
    tail -n 40 "$logs/$name.log"
    said=$(grep -E "$pattern" "$logs/$name.log" | tail -n 6 | cut -c 1-300 | paste -sd ';')
    table+=("$(printf '%-8s %6d %7d  %s' "$name" "$status" $((SECONDS - start)) "$said")")
}

for part in "$@"; do
    value=${part#*=}
    [ "$value" != "$part" ] || value=
    case ${part%%=*} in
    tests)
        # shellcheck disable=SC2086 # several arguments
        run tests '(passed|failed|error).* in ' "$python" -m pytest -m gpu -q ${TEST_ARGS:-}
        ;;
    ops)
        run ops '^below|^error' "$python" tools/bench_ops.py "${value:-all}" \
            --json "$logs/ops.json"
        ;;
    bench)
        run bench '^  (ok|failed|hung|does not fit):|^error' "$python" -m llmq bench \
            --config "${value:-benchmarks/h100/h100_bf16.yaml}" \
            --out "$logs/bench"
        ;;
    profile)
        run profile 'tok/s|^between|^error' "$python" tools/profile_step.py --device cuda \
            --model "${value:-Qwen2.5-0.5B}" --batch-size 32 --grad-accumulation 2 \
            --lmhead-chunks 4 --opt-m-dtype bf16 --opt-v-dtype bf16
        ;;
    esac
done

printf '\n%-8s %6s %7s  %s\n' part status seconds 'in short'
printf '%s\n' "${table[@]}"
exit "$failed"
