#include "ingot/apps/cli/cli.h"

int main(int argc, char** argv) {
  using namespace ingot::cli;
  Command root("ingot", "");
  root.examples(R"(  ingot tokenizer train --data corpus/ --vocab 4096 --out tok.json
  ingot info --preset golf --json
  ingot doctor
Every subcommand has its own --help.)");
  add_plot(root);
  add_doctor(root);
  return run(root, argc, argv);
}
