#!/usr/bin/env bash
# compute-sanitizer over the kernel tests on a GPU: memcheck, then racecheck for shared memory.
#
#   tools/sanitize.sh LOGS [--select K/N] [pytest arguments; default: the tests of every operation]
#
# --select takes the K-th of N parts of about as many tests each, for machines that are lent for
# minutes. On an H100 both tools take 1.4 s a test on average, attention several times that; of 8
# parts each stays below 8 minutes. Parts can run at the same time, on one GPU too. Exits with 1
# if a tool finds something, or a test fails.
set -uo pipefail
logs=${1:?"usage: tools/sanitize.sh LOGS [--select K/N] [pytest arguments]"}
shift
part=1 parts=1
if [ "${1:-}" = --select ]; then
    if ! [[ ${2:-} =~ ^([1-9][0-9]*)/([1-9][0-9]*)$ ]] || ((BASH_REMATCH[1] > BASH_REMATCH[2])); then
        echo "error: --select: expected K/N such as 1/8, got '${2:-}'" >&2 && exit 64
    fi
    part=${BASH_REMATCH[1]} parts=${BASH_REMATCH[2]}
    shift 2
fi
[ $# -gt 0 ] || set -- tests/ops
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
name=$part-of-$parts
pytest=("$python" -m pytest -m gpu -q -p no:cacheprovider)

# Without the tests of libraries: racecheck finds hazards in cuDNN's kernels.
"${pytest[@]}" -k "not cudnn" --collect-only "$@" >"$logs/$name.collected.log" || exit 1
mapfile -t tests < <(grep '::' "$logs/$name.collected.log")
first=$((${#tests[@]} * (part - 1) / parts))
last=$((${#tests[@]} * part / parts))
printf '%s\n' "${tests[@]:first:last-first}" >"$logs/$name.tests"
echo "tests $((first + 1))-$last of ${#tests[@]}"

failed=0
for tool in memcheck racecheck; do
    start=$SECONDS
    compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-regex-exclude kns=cutlass \
        --log-file "$logs/$name.$tool.log" "${pytest[@]}" "@$logs/$name.tests" \
        >"$logs/$name.$tool.pytest.log" 2>&1
    status=$?
    [ "$status" -eq 0 ] || failed=1
    echo "$tool: exit $status in $((SECONDS - start)) s;" \
        "$(tail -n 1 "$logs/$name.$tool.pytest.log"); $(tail -n 1 "$logs/$name.$tool.log")"
done
exit "$failed"
