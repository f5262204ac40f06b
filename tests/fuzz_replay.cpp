// Replaces libFuzzer where the compiler lacks it. Runs the target once on each named file, or on each file of a
// directory; with -runs=N or -max_total_time=SECONDS then also on mutations of these files. There is no feedback from
// coverage: inputs are chains of 1 to 8 random changes, and -seed=N gives the same inputs every time. An input that
// ends the process is kept as <artifact_prefix>crash-<number>.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ingot/io/file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));
// An allocation of a quarter of a gigabyte for a file of some kilobytes is a finding.
extern "C" const char* __asan_default_options() { return "max_allocation_size_mb=256:detect_leaks=1"; }

namespace {

constexpr unsigned kSlowSeconds = 10;  // a slower input is a finding
constexpr size_t kMostBytes = 1 << 17;

std::string current, artifact = "";
int64_t number = 0;

void keep_input() {
  const std::string path = artifact + "crash-" + std::to_string(number);
  std::fprintf(stderr, "input %lld kept as %s\n", static_cast<long long>(number), path.c_str());
  if (FILE* f = std::fopen(path.c_str(), "wb")) {
    std::fwrite(current.data(), 1, current.size(), f);
    std::fclose(f);
  }
}
void on_signal(int signal) {
  std::fprintf(stderr, signal == SIGALRM ? "an input takes too long\n" : "signal %d\n", signal);
  keep_input();
  _exit(77);
}

class Mutator {
 public:
  Mutator(std::vector<std::string> corpus, uint64_t seed) : corpus_(std::move(corpus)), state_(seed * 2 + 1) {}
  std::string next() {
    std::string s = any();
    for (uint64_t n = 1 + below(8); n > 0; --n) change(s);
    if (s.size() > kMostBytes) s.resize(kMostBytes);
    return s;
  }

 private:
  uint64_t below(uint64_t n) {  // splitmix64
    state_ += 0x9e3779b97f4a7c15ull;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (z ^ (z >> 31)) % n;
  }
  const std::string& any() { return corpus_[below(corpus_.size())]; }
  std::string number_text() {
    static const char* const kNumbers[] = {"0",
                                           "-1",
                                           "1",
                                           "255",
                                           "256",
                                           "4096",
                                           "65536",
                                           "2147483647",
                                           "2147483648",
                                           "4294967296",
                                           "9223372036854775807",
                                           "18446744073709551615",
                                           "1e308",
                                           "-0",
                                           "1.5",
                                           "null",
                                           "true",
                                           "[]",
                                           "{}",
                                           "\"\"",
                                           "\"\\ud800\"",
                                           "0x10",
                                           "NaN"};
    return kNumbers[below(std::size(kNumbers))];
  }
  // A run of digits becomes another number: sizes and offsets in JSON.
  void change_number(std::string& s) {
    const size_t from = below(s.size());
    for (size_t i = 0; i < s.size(); ++i) {
      const size_t at = (from + i) % s.size();
      if (s[at] < '0' || s[at] > '9') continue;
      size_t begin = at, end = at;
      while (begin > 0 && s[begin - 1] >= '0' && s[begin - 1] <= '9') --begin;
      while (end < s.size() && s[end] >= '0' && s[end] <= '9') ++end;
      s.replace(begin, end - begin, number_text());
      return;
    }
  }
  void change(std::string& s) {
    static const uint64_t kWide[] = {
        0, 1, 7, 8, 255, 4095, 4096, 0x7fffffff, 0x80000000, 0xffffffff, 0x7fffffffffffffff, ~uint64_t(0)};
    if (s.empty()) s = any();
    if (s.empty()) s = "x";
    const size_t at = below(s.size()), n = 1 + below(below(4) == 0 ? s.size() : 16), count = std::min(n, s.size() - at);
    switch (below(11)) {
      case 0: s[at] = char(s[at] ^ (1 << below(8))); break;
      case 1: s[at] = char(below(256)); break;
      case 2: s.erase(at, count); break;
      case 3: s.insert(at, s.substr(at, count)); break;
      case 4: s.insert(at, count, char(below(256))); break;
      case 5: s.resize(at); break;
      case 6: {
        const std::string& other = any();
        if (!other.empty()) s.insert(at, other.substr(below(other.size()), n));
        break;
      }
      case 7: {
        const uint64_t wide = kWide[below(std::size(kWide))];
        const size_t bytes = size_t(1) << below(4);
        if (s.size() - at >= bytes) std::memcpy(s.data() + at, &wide, bytes);
        break;
      }
      case 8:
      case 9: change_number(s); break;
      default: {
        const size_t to = below(s.size());
        const std::string piece = s.substr(at, count);
        s.replace(to, std::min(piece.size(), s.size() - to), piece);
      }
    }
  }
  std::vector<std::string> corpus_;
  uint64_t state_;
};

void run_one(const std::string& input) {
  current = input;
  ++number;
  alarm(kSlowSeconds);
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(current.data()), current.size());
  alarm(0);
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<std::string> corpus;
  int64_t runs = 0, seconds = 0, seed = 1;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    const auto value = [&](const char* name, int64_t& into) {
      if (word.rfind(name, 0) == 0) into = std::atoll(word.c_str() + std::strlen(name));
    };
    if (word[0] == '-') {  // libFuzzer's further options have no effect here
      value("-runs=", runs), value("-max_total_time=", seconds), value("-seed=", seed);
      if (word.rfind("-artifact_prefix=", 0) == 0) artifact = word.substr(17);
      continue;
    }
    for (const std::string& file : ingot::is_directory(word) ? ingot::list_files(word) : std::vector<std::string>{word})
      corpus.push_back(ingot::read_file(file));
  }
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(keep_input);
  for (const int s : {SIGABRT, SIGALRM}) ::signal(s, on_signal);
  for (const std::string& input : corpus) run_one(input);
  std::printf("%zu inputs replayed\n", corpus.size());
  if (corpus.empty()) return 1;
  if (runs == 0 && seconds == 0) return 0;
  Mutator mutator(corpus, uint64_t(seed));
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  int64_t done = 0;
  while ((runs == 0 || done < runs) && (seconds == 0 || passed() < double(seconds))) run_one(mutator.next()), ++done;
  std::printf("seed %lld: executed %lld mutated inputs in %.0f s\n", static_cast<long long>(seed),
              static_cast<long long>(done), passed());
  return 0;
}
