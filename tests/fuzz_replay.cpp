// Replaces libFuzzer where the compiler has none: runs the target once on each file named, or on each file of a
// directory.
#include <cstdint>
#include <cstdio>

#include "ingot/io/file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int count, char** arguments) {
  int runs = 0;
  for (int i = 1; i < count; ++i) {
    if (arguments[i][0] == '-') continue;  // libFuzzer's options mean nothing here
    const std::string path = arguments[i];
    for (const std::string& file :
         ingot::is_directory(path) ? ingot::list_files(path) : std::vector<std::string>{path}) {
      const std::string bytes = ingot::read_file(file);
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      ++runs;
    }
  }
  std::printf("%d inputs replayed\n", runs);
  return runs > 0 ? 0 : 1;
}
