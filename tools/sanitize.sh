#!/usr/bin/env bash
# compute-sanitizer over the kernel tests on a GPU: memcheck, then racecheck for shared memory.
#
#   tools/sanitize.sh LOGS [pytest arguments; default: the small cases of every operation]
set -uo pipefail
logs=${1:?"usage: tools/sanitize.sh LOGS [pytest arguments]"}
shift
[ $# -gt 0 ] || set -- tests/ops -k "cuda and not qwen and not cudnn"
mkdir -p "$logs"
python=${PYTHON:-python3}
failed=0
for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-regex-exclude kns=cutlass \
        --log-file "$logs/$tool.log" "$python" -m pytest -m gpu -q -x -p no:cacheprovider "$@" \
        >"$logs/$tool.pytest.log" 2>&1
    status=$?
    [ "$status" -eq 0 ] || failed=1
    echo "$tool: exit $status; $(tail -n 1 "$logs/$tool.pytest.log"); $(tail -n 1 "$logs/$tool.log")"
done
exit "$failed"
