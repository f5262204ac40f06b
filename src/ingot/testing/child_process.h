#pragma once
// A test's body in a separate process, which may use up resources that the test's process still needs.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <functional>

namespace ingot::testing {

// The wait status of a child process that runs `body`; the child is killed after `seconds`.
inline int status_of_child(unsigned seconds, const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(seconds);
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

// From this call on this process may allocate at most `bytes` more memory; a thread's stack takes 8 MB.
inline void leave_memory(int64_t bytes) {
  long pages = 0;
  if (FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%ld", &pages) != 1) pages = 0;
    std::fclose(f);
  }
  const auto all = rlim_t(pages * ::sysconf(_SC_PAGESIZE) + bytes);
  const rlimit limit{all, all};
  ::setrlimit(RLIMIT_AS, &limit);
}

}  // namespace ingot::testing
