# Sourced by ./run and the scripts here, in the tree's root.
# drop_foreign DIRECTORY: removes a build directory that came with a copied or moved tree, because the directory would build the original tree.
drop_foreign() {
  local home
  home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:[A-Z]*=//p' "$1/CMakeCache.txt" 2>/dev/null) || return 0
  if [ -z "$home" ] || [ "$home" -ef . ]; then return 0; fi
  printf '%s was made for %s: building anew\n' "$1" "$home" >&2
  rm -rf "$1"
}
