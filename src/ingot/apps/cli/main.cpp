#include <cstdio>

#include "ingot/core/version.h"

int main() { std::printf("ingot %s (%s)\n", ingot::version(), ingot::commit()); }
