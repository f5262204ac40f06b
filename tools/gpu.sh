#!/usr/bin/env bash
# For a machine with an NVIDIA GPU; needs no network and installs nothing. Builds with CUDA, runs the tests, measures, and writes
# bench/results/<gpu>/*.json. `./run gpu [STAGE...]`; without a stage, all that are not marked as "not a default stage":
#   build     the library, its tests, the ingot binary and libingot_bench.so
#   test      the tests labelled gpu (writes gpu_tests.json)
#   cpu-test  every other test, once per level of vector code that this CPU has
#   rmsnorm   forward and backward beside PyTorch, the original project if INGOT_ORIGINS (default .origins) has its source, and Liger-Kernel
#             (as below)
#   rope, gate  rotary embeddings; the gate of SwiGLU and the activations, beside PyTorch, Liger-Kernel where it is installed or
#             INGOT_LIGER (default: in .whl) names its wheel, and of the gate the origin (megagemm/swiglu.py of MGRrmsnorm)
#   mlp       whole MLPs, forward and training steps, beside PyTorch, and the origin mlp-megakernel and libtiny_cuda_nn.so
#             (bench/peers/tiny_cuda_nn.cu) where INGOT_ORIGINS holds them
#   portable  the variants of operations and tokens for GPUs other than Hopper (not a default stage)
#   decode    tokens of GPT-OSS's shapes (not a default stage)
#   train     a training step of golf beside torch.compile of the same model (not a default stage: four minutes)
#   python    the PyTorch package: its tests on the GPU, the cost of a call on the host, the image example
#   sanitize  memcheck, racecheck, synccheck and initcheck over the GPU tests named ...Small (writes sanitizers.json), and the
#             number of instructions of the kernels (compute-sanitizer, cuobjdump)
#   imitate   the GPU tests without Hopper's code and with the limits of an A100, then of an RTX 3090; memcheck and racecheck of the small
#             ones as an A100 (tools/ptx_build.py; not a default stage)
#   cpu       CPU training steps in PyTorch and `ingot bench`, on two cores (not a default stage: ten minutes)
#   sweep     rmsnorm under every configuration, to choose defaults from (not a default stage)
# Each stage has a time limit; what it has measured until then is an unfinished report (tools/suite_report.py). INGOT_BENCH_ARGS=--continue measures
# the missing cases: more options of bench/gpu.py, tools/gpu_tests.py and tools/sanitize.py.
# If OUT is set, reports and logs are copied to $OUT.
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/own_build.sh

readonly build=build/cuda logs=build/gpu-logs origins=${INGOT_ORIGINS:-.origins}
export INGOT_COMMAND="./run gpu${*:+ $*}" PYTHONUNBUFFERED=1
drop_foreign $build
mkdir -p "$logs"
touch "$logs/started"
failures=()

# step NAME SECONDS COMMAND...: the output also goes to a log; a failure is counted, and the next step runs.
step() {
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  printf '\n=== %s\n' "$name"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$logs/$name.log" | tail -n "${lines:-40}"
  status=${PIPESTATUS[0]}
  if [ "$status" -eq 0 ]; then
    printf '=== %s: passed (%d s)\n' "$name" $((SECONDS - started))
  else
    failures+=("$name")
    printf '=== %s: FAILED with status %d (%d s)\n' "$name" "$status" $((SECONDS - started))
  fi
  return "$status"
}

configure_and_build() {
  cmake -G Ninja -S . -B $build -DCMAKE_BUILD_TYPE=Release -DINGOT_CUDA=ON -DINGOT_TESTS=ON -DINGOT_APPS=ON \
    -DPython_EXECUTABLE="$(command -v python3)" >"$logs/configure.log" 2>&1 ||
    { tail -n 30 "$logs/configure.log"; return 1; }
  grep -h 'Ingot:' "$logs/configure.log"
  ninja -C $build -k 0 all ingot_bench | grep -vE '^(\[|ptxas|$)|bytes stack frame|bytes spill'
  return "${PIPESTATUS[0]}"
}
cpu_levels() {
  printf 'baseline\n'
  grep -qw avx512vl /proc/cpuinfo && printf 'avx512\n'
  grep -qw avx512_bf16 /proc/cpuinfo && printf 'avx512_bf16\n'
  grep -qw amx_bf16 /proc/cpuinfo && printf 'avx512_amx\n'
}
sass_counts() {
  cuobjdump -sass $build/libingot.a 2>/dev/null | awk '
    /Function :/ { kernel = $3 }
    /LDG\.E[.A-Z]*\.128/ { wide[kernel]++ }
    /LDL|STL/ { local_memory[kernel]++ }
    END { for (k in wide) n++; for (k in local_memory) m++; print n + 0, "kernels with 16-byte loads,", m + 0, "with local memory" }'
}

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(build test cpu-test rmsnorm rope gate mlp python sanitize)
for stage in "${stages[@]}"; do
  case $stage in
    build | test | cpu-test | rmsnorm | rope | gate | mlp | portable | decode | train | python | sanitize | imitate | cpu | sweep) ;;
    *) echo "gpu: found stage $stage, expected build, test, cpu-test, rmsnorm, rope, gate, mlp, portable, decode, train, python, sanitize, imitate, cpu or sweep" >&2; exit 2 ;;
  esac
done
nvidia-smi -L 2>/dev/null || { echo "gpu: found no NVIDIA GPU here (nvidia-smi lists none); expected one" >&2; exit 7; }
liger=${INGOT_LIGER:-$(find .whl -name 'liger_kernel*.whl' 2>/dev/null | head -n 1)}
measure=(python3 bench/gpu.py --native $build/libingot_bench.so --origins "$origins" ${liger:+--liger "$liger"} ${INGOT_BENCH_ARGS:-})
export -f configure_and_build sass_counts
export build logs

for stage in "${stages[@]}"; do
  case $stage in
    build) step build 300 bash -c configure_and_build ;; # the finished parts can still be tested
    test) step test 600 python3 tools/gpu_tests.py --build $build ${INGOT_BENCH_ARGS:-} ;;
    cpu-test)
      for level in $(cpu_levels); do
        GTEST_FILTER='-*Cuda.*' INGOT_CPU_LEVEL=$level step "cpu-test-$level" 200 ctest --test-dir $build -j8 --output-on-failure
      done ;;
    rmsnorm | rope | gate | portable | decode) step "$stage" 480 "${measure[@]}" "$stage" ;;
    train) step train 560 "${measure[@]}" train ;;
    mlp) step mlp 560 "${measure[@]}" mlp ${INGOT_MLP_ARGS:-} ;;
    python)
      lines=120
      export PYTHONPATH=$PWD/$build/python${PYTHONPATH:+:$PYTHONPATH}
      INGOT_TEST_DEVICE=cuda step python 300 python3 bindings/python/tests/run.py --tb=short
      step host-cost 200 python3 bench/gpu.py host_cost ${INGOT_BENCH_ARGS:-}
      step neural-image 120 python3 examples/neural_image.py --out "$logs"
      unset lines ;;
    sweep) step sweep 300 python3 bench/peers/gpu_rmsnorm.py --native $build/libingot_bench.so --sweep "$logs/rmsnorm_sweep.json" ;;
    sanitize)
      lines=60
      step sanitizers 500 python3 tools/sanitize.py --build $build ${INGOT_BENCH_ARGS:-}
      step sass 60 bash -c sass_counts
      unset lines ;;
    imitate)
      step imitate-build 60 python3 tools/ptx_build.py $build build/ptx80 || continue
      for capability in 8.0 8.6; do step "imitate-$capability" 600 python3 tools/gpu_tests.py --build build/ptx80 --as $capability ${INGOT_BENCH_ARGS:-}; done
      step imitate-sanitizers 600 python3 tools/sanitize.py --build build/ptx80 --as 8.0 --tools memcheck,racecheck ${INGOT_BENCH_ARGS:-} ;;
    cpu)
      if [ -f bench/peers/train_step.py ]; then
        OMP_NUM_THREADS=2 step cpu-train-step 560 taskset -c 0,1 python3 bench/peers/train_step.py --native $build/ingot --threads 2 \
          --json "$logs/cpu_train_step.json" ${INGOT_TRAIN_STEP_ARGS:-}
      else
        echo "cpu: bench/peers/train_step.py is not there yet"
      fi
      step cpu-ingot-bench 300 taskset -c 0,1 bash -c "$build/ingot bench --json >$logs/cpu_ingot_bench.json" ;;
  esac
done

if [ -n "${OUT:-}" ]; then
  mkdir -p "$OUT/logs" "$OUT/unfinished"
  find bench/results -name '*.json' -newer "$logs/started" ! -path '*/unfinished/*' -exec cp {} "$OUT/" \;
  find bench/results -name '*.json' -newer "$logs/started" -path '*/unfinished/*' -exec cp {} "$OUT/unfinished/" \;
  find "$logs" -name '*.json' -newer "$logs/started" -exec cp {} "$OUT/logs/" \;
  (cd "$logs" && tail -n 400 -- *.log) >"$OUT/logs/all.log"
fi
[ ${#failures[@]} -eq 0 ] || printf '\nfailed: %s\n' "${failures[*]}"
printf '\ngpu: %d failed\n' ${#failures[@]}
[ ${#failures[@]} -eq 0 ]
