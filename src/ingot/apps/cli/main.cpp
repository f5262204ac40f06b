#include "ingot/apps/cli/framework/cli.h"

int main(int argc, char** argv) {
  using namespace ingot::cli;
  Command root("ingot", "");
  root.examples(R"(  ingot demo
  ingot train --preset nano --data input.txt --out runs/a --steps 2000
  ingot generate runs/a --prompt "Once" --tokens 200
  ingot eval runs/a --data input.txt --json
Every subcommand has its own --help.)");
  add_demo(root);
  add_train(root);
  add_eval(root);
  add_generate(root);
  add_ttt(root);
  add_chat(root);
  add_serve(root);
  add_convert(root);
  add_export(root);
  add_tokenizer(root);
  add_data(root);
  add_info(root);
  add_plot(root);
  add_doctor(root);
  add_bench(root);
  return run(root, argc, argv);
}
