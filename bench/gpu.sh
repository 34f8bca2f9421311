#!/usr/bin/env bash
# What waits for a GPU, in three steps: docs/gpu.md. All of it comes into $OUT, or runs/gpu-<time>: eight files.
#
#   bash bench/gpu.sh --archives FOLDER --steps tests,comparison --seconds 280
#   bash bench/gpu.sh --archives FOLDER --steps runs --only 'claim-fdse-*' --seconds 590 -- --seeds paper
#   bash bench/gpu.sh --device cpu --seconds 300           # digits at smoke scale, to see that it runs
#
# --archives FOLDER, --data FOLDER, --only IDS, --jobs N   as of reproduce_tables.py; what follows -- goes there too
#                     (N: 6, on a CPU 2)
# --device NAME       cuda (default), cuda:N or cpu
# --seconds N         for all of it (590)
# --steps LIST        some of tests,comparison,runs (all)
#
# Whatever becomes of a step, the next one begins. Exit code 0 if each went well or came to its limit, 1 if one
# failed, 2 for bad usage. The folders of the runs stay in runs/: the same command resumes them.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python} device=cuda archives="" data=data total=590 jobs='' only="claim-*" steps=tests,comparison,runs
usage() { echo "gpu.sh: $1 (the first lines of bench/gpu.sh explain every flag)" >&2; exit 2; }

while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in --archives|--data|--device|--seconds|--jobs|--only|--steps) ;; *) usage "$1 is no flag" ;; esac
    [ $# -gt 1 ] || usage "$1 needs a value"
    name=${1#--}
    [ "$name" != seconds ] || name=total
    printf -v "$name" %s "$2"
    shift 2
done
[ $# -eq 0 ] || shift
[[ $total =~ ^[1-9][0-9]*$ ]] || usage "--seconds is $total; expected a number of seconds"
[[ $device == cpu || $device =~ ^cuda(:[0-9]+)?$ ]] || usage "--device is $device; expected cuda, cuda:N or cpu"
[[ $steps =~ ^(tests|comparison|runs)(,(tests|comparison|runs))*$ ]] || usage "--steps is $steps; expected some of tests,comparison,runs"
[ -z "$archives" ] || [ -d "$archives" ] || usage "--archives $archives is no folder"

out=${OUT:-runs/gpu-$(date +%Y%m%d-%H%M%S)}
kept=${KEPT:-runs/gpu-records}  # between two calls
mkdir -p "$out" "$kept" && out=$(cd "$out" && pwd) || exit 1
new=$kept/new.jsonl records=$kept/runs.jsonl failed=0
touch "$new" "$out/summary.txt" "$kept/begun"
cat results/runs.jsonl "$new" > "$records" && cp results/checked.json "$kept/"
note() { echo "$1" | tee -a "$out/summary.txt"; }
left() { echo $((total - SECONDS - 5)); }

step() { # NAME LIMIT COMMAND...: run it for at most LIMIT seconds, and no longer than all may take
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    [[ ,$steps, == *,$name,* ]] || return
    [ "$limit" -lt "$(left)" ] || limit=$(left)
    [ "$limit" -ge 5 ] || { note "$name: not begun, the time is over"; return; }
    { timeout --signal=TERM --kill-after=8 "$limit" "$@" > "$out/$name.log" 2>&1; } 2> /dev/null
    code=$?
    case $code in
        0) note "$name: done in $((SECONDS - start)) s" ;;
        124|137|143) note "$name: ended at its limit of $limit s; $name.log has what it did" ;;
        *) note "$name: failed with exit code $code after $((SECONDS - start)) s: $(tail -n 1 "$out/$name.log" | cut -c1-200)"
           failed=1 ;;
    esac
}

[ "$device" != cpu ] || jobs=${jobs:-2}
jobs=${jobs:-6}
folders=(--data "$data") gpus=() figures=(--dataset digits --size 64 --packed 2) scale=(--scale smoke)
[ -z "$archives" ] || folders+=(--archives "$archives")
if [ "$device" != cpu ]; then
    number=${device#cuda} number=${number#:} gpus=(--gpus "${number:-0}") scale=()
    figures=(--packed "$jobs,$((2 * jobs)),1")
    { nvidia-smi; "$python" -c "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0))"; } > "$out/gpu.txt" 2>&1
fi
export GPU_TESTS_ON=$device PYTHONUNBUFFERED=1
step tests 120 "$python" -m pytest -m gpu -n 4 -vv -rs -p no:cacheprovider --tb=short tests/machinery/test_gpu.py tests/machinery/test_augment.py
limit=150 && [[ $steps == *runs* ]] || limit=$(left)
step comparison "$limit" "$python" -m bench.bench "${folders[@]}" --device "$device" "${figures[@]}" --seconds 8 --limit $((limit - 15)) --out "$out/comparison.json"
minutes=$(awk "BEGIN {print ($(left) > 40 ? $(left) - 35 : 5) / 60}")  # the rest is for the start and the pages
step runs "$total" "$python" reproduce_tables.py --run --minutes "$minutes" --jobs "$jobs" --only "$only" "${gpus[@]}" "${scale[@]}" \
    "${folders[@]}" --records "$records" --out "$kept/results" "$@"
tail -n +$(($(wc -l < results/runs.jsonl) + 1)) "$records" > "$out/runs.jsonl" && cp "$out/runs.jsonl" "$new"
find runs -mindepth 2 -maxdepth 2 -newer "$kept/begun" \( -name '*.json' -o -name metrics.jsonl -o -name timing.jsonl -o -name log.txt \) \
    -not -path 'runs/gpu-*' -print0 | tar czf "$out/runs.tar.gz" --null -T -
note "$(wc -l < "$out/runs.jsonl") runs recorded, $SECONDS s, everything in $out"
exit $failed
