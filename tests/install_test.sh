#!/usr/bin/env bash
# Installs a build into a fresh prefix and builds examples/ against it, as a user's project would.
#   tests/install_test.sh SOURCE_DIR BUILD_DIR C++_COMPILER
set -euo pipefail
source_dir=$1 build_dir=$2 compiler=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build_dir" --prefix "$work/prefix" >/dev/null
cp -r "$source_dir/examples" "$work/examples"   # the examples are built away from the tree, whose headers must not be found
cmake -G Ninja -S "$work/examples" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_CXX_COMPILER="$compiler" \
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS="${INGOT_EXAMPLE_FLAGS:-}" >/dev/null
cmake --build "$work/build"
found=$("$work/build/hello")
expected="1.20 1.60 0.00 0.00 1.00 1.00 1.00 1.00 "
[ "$found" = "$expected" ] || { echo "hello printed '$found', expected '$expected'"; exit 1; }
# A kind of model that the library does not know is opened by its path like every other kind.
printf 'abcabcabcd' >"$work/text.pairs"
found=$("$work/build/own_model" "$work/text.pairs" "a")
[ "$found" = "bcabcabcabca" ] || { echo "own_model printed '$found', expected 'bcabcabcabca'"; exit 1; }
if found=$("$work/build/own_model" "$work/absent" "a" 2>&1); then echo "own_model took a path that is not there"; exit 1; fi
[ "$found" = "$work/absent: found no such file or directory, expected a run, a checkpoint or a published model" ] || { echo "own_model printed '$found'"; exit 1; }
