#!/usr/bin/env bash
# Fuzzes every parser for SECONDS each (default 60), from the corpus in tests/fuzz_corpus. Without clang and libFuzzer,
# tests/fuzz_replay.cpp mutates the corpus without feedback from coverage. --replay only runs the corpus.
# Findings are kept in build/fuzz/findings; the input of a mended fault goes into the corpus.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/own_build.sh

known=$(find src -name '*.fuzz.cpp' | sed 's,.*/\(.*\)\.fuzz\.cpp$,\1,' | sort | xargs)
seconds=60 replay=no targets=()
for argument in "$@"; do
  case $argument in
    --replay) replay=yes ;;
    -h | --help) echo "usage: ./run fuzz [SECONDS] [--replay] [TARGET...]"; exit 0 ;;
    [0-9]*) seconds=$argument ;;
    -*) echo "fuzz: unknown option $argument" >&2; exit 2 ;;
    *)
      case " $known " in *" $argument "*) ;; *) echo "fuzz: found the target '$argument', expected one of $known" >&2; exit 2 ;; esac
      targets+=("$argument") ;;
  esac
done

build=build/asan
# libFuzzer is a package of its own in some distributions (libclang-rt-*-dev).
has_libfuzzer() { printf 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' | clang++ -x c++ -fsanitize=fuzzer,address - -o /dev/null 2>/dev/null; }
if [ $replay = no ] && has_libfuzzer; then
  build=build/fuzz
elif [ $replay = no ]; then
  echo "fuzz: no clang++ with libFuzzer here: mutations of the corpus, without feedback from coverage"
fi
drop_foreign $build
if [ $build = build/fuzz ]; then
  cmake -G Ninja -S . -B $build -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo -DINGOT_CUDA=OFF \
    -DINGOT_APPS=OFF -DINGOT_TESTS=OFF -DINGOT_FUZZ=ON >/dev/null
else
  cmake --preset asan -DINGOT_FUZZ=ON >/dev/null
fi
[ ${#targets[@]} -gt 0 ] || read -ra targets <<<"$known"
ninja -C "$build" --quiet "${targets[@]/#/fuzz_}"

findings=$PWD/build/fuzz/findings
mkdir -p "$findings"
failed=()
for target in "${targets[@]}"; do
  printf '%-14s' "$target"
  log=$build/$target.log
  if [ $replay = yes ]; then
    options=()
  else
    mkdir -p "$build/corpus/$target"
    # Big allocations, slow inputs and leaks are findings too.
    options=("$build/corpus/$target" -max_total_time="$seconds" -max_len=131072 -timeout=10 -malloc_limit_mb=256 -rss_limit_mb=1024
      -print_final_stats=1 -artifact_prefix="$findings/$target-")
  fi
  if "$build/fuzz_$target" "${options[@]}" "tests/fuzz_corpus/$target" >"$log" 2>&1; then
    if [ $replay = yes ] || [ $build = build/asan ]; then tail -n 1 "$log"; else sed -n 's/^stat::number_of_executed_units: */executed /p' "$log"; fi
  else
    failed+=("$target")
    echo "FAILED, see $log"
    tail -n 25 "$log"
  fi
done
[ ${#failed[@]} -eq 0 ] || { echo "findings in ${failed[*]}: $findings"; exit 1; }
