#!/usr/bin/env bash
# Runs fuzzers that are built, many at once, and says what they have done. Needs bash and coreutils alone, so that it can
# run where nothing can be built.
#
# Usage: run.sh FOLDER SECONDS JOBS OUT [SUBJECT...]
#   FOLDER  holds corpus/SUBJECT and fuzzers, asan/fuzz_SUBJECT and fast/fuzz_SUBJECT, of one build or both; and lib/,
#           where the machine lacks libraries
#   OUT     gets tally.tsv (a line for each subject and build), findings/ (inputs that failed, with their logs) and
#           corpora.tar.gz: what new inputs reach, merged with FOLDER's
# The exit code is 1 where there are findings. JOBS processes take turns at the subjects, by slices of time; a fast build
# has most of it, and what it found is replayed by the other one in the end.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '5,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$(realpath "$1") seconds=$2 jobs=$3
mkdir -p "$4"
out=$(realpath "$4")
shift 4
[ $# -gt 0 ] || set -- $(ls "$folder/corpus")
mkdir -p "$out"/{corpus,log,findings,merged}
[ ! -d "$folder/lib" ] || export LD_LIBRARY_PATH=$folder/lib
export OMP_NUM_THREADS=1 ASAN_OPTIONS=allocator_may_return_null=1:symbolize=0

# Slow ones have one turn where others have two; one turn in four, of slow ones in two, is of the build that sees more.
slow=" command_line folder tokenizer_ranks tokenizer_text "
turns=()
builds=(fast fast asan fast)
for round in 0 1 2 3; do
  for subject in "$@"; do
    build=${builds[round]}
    [ -x "$folder/$build/fuzz_$subject" ] || { [ "$build" = fast ] && build=asan || build=fast; }
    [ -x "$folder/$build/fuzz_$subject" ] || continue
    [[ $slow == *" $subject "* && $((round % 2)) = 1 ]] || turns+=("$build $subject")
  done
done
[ ${#turns[@]} -gt 0 ] || { echo "$folder: no fuzzers" >&2; exit 2; }
slice=$((seconds * jobs / ${#turns[@]}))
slice=$((slice < 5 ? 5 : slice > 60 ? 60 : slice))

fuzzer() {  # BUILD SUBJECT, and what libFuzzer is told besides
  local build=$1 subject=$2
  shift 2
  "$folder/$build/fuzz_$subject" -print_final_stats=1 -close_fd_mask=2 -timeout=20 -rss_limit_mb=3000 \
    -artifact_prefix="$out/findings/$subject-" "$@"
}

work() {  # NUMBER: one process's turns
  local at=$1 end=$((SECONDS + seconds)) left
  while left=$((end - SECONDS)); [ "$left" -gt 0 ]; do
    read -r build subject <<< "${turns[at % ${#turns[@]}]}"
    local log=$out/log/$subject.$build.$at quick=()
    # The fast build asks which edges are reached, not how often, and draws inputs evenly: a third more executions.
    [ "$build" = asan ] || quick=(-use_counters=0 -entropic=0)
    fuzzer "$build" "$subject" "${quick[@]}" -seed=$((at + RANDOM * 65536 + 1)) -max_total_time=$((left < slice ? left : slice)) \
      "$out/corpus/$subject" "$folder/corpus/$subject" > "$log" 2>&1 || cp "$log" "$out/findings/$subject.$build.$at.log"
    at=$((at + jobs))
  done
}

for subject in "$@"; do mkdir -p "$out/corpus/$subject" "$out/merged/$subject"; done
SECONDS=0
for ((job = 0; job < jobs; ++job)); do work "$job" & done
wait

# All that was found, by the build that sees more; and the least of it that reaches as much.
finish() {
  local subject=$1 build
  for build in asan fast; do [ -x "$folder/$build/fuzz_$subject" ] && break; done
  fuzzer "$build" "$subject" -merge=1 "$out/merged/$subject" "$folder/corpus/$subject" "$out/corpus/$subject" \
    > "$out/log/merge.$subject" 2>&1 || cp "$out/log/merge.$subject" "$out/findings/$subject.merge.log"
  for build in asan fast; do
    [ -x "$folder/$build/fuzz_$subject" ] || continue
    fuzzer "$build" "$subject" -runs=0 "$out/merged/$subject" > "$out/log/reach.$subject.$build" 2>&1 ||
      cp "$out/log/reach.$subject.$build" "$out/findings/$subject.$build.reach.log"
  done
}
export -f finish fuzzer
export folder out
printf '%s\n' "$@" | xargs -P "$jobs" -I{} bash -c 'finish {}'

# The sum, or the largest, of the numbers at the end of all matches.
numbers() { { grep -ho "$2" "${@:3}" 2>/dev/null || true; } | sed 's/.*[^0-9]//' | awk -v how="$1" \
  '{n = how == "sum" ? n + $1 : $1 > n ? $1 : n} END {print n + 0}'; }
{
  printf 'subject\tbuild\texecutions\tedges\tof\tinputs\tbytes\tfindings\n'
  for subject in "$@"; do
    for build in fast asan; do
      [ -x "$folder/$build/fuzz_$subject" ] || continue
      executions=$(numbers sum 'number_of_executed_units: *[0-9]*' "$out"/log/"$subject.$build".*)
      edges=$(numbers most 'cov: [0-9]*' "$out/log/reach.$subject.$build")
      of=$(numbers most 'modules *([0-9]*' "$out/log/reach.$subject.$build")
      findings=$(find "$out/findings" -name "$subject-*" | wc -l)
      inputs=$(find "$out/merged/$subject" -type f | wc -l)
      bytes=$(find "$out/merged/$subject" -type f -printf '%s\n' | awk '{n += $1} END {print n + 0}')
      printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$subject" "$build" "$executions" "$edges" "$of" "$inputs" "$bytes" "$findings"
    done
  done
} > "$out/tally.tsv"
tar -C "$out" -czf "$out/corpora.tar.gz" merged
awk -F'\t' 'NR > 1 {n += $3} END {printf "%d executions\n", n}' "$out/tally.tsv"
[ -z "$(ls "$out/findings")" ]
