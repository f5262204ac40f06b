#include "ingot/core/cpu/shared_counter.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <set>

namespace ingot {
namespace {

TEST(shared_counter, gives_each_number_to_one_process) {
  constexpr int kProcesses = 4, kEach = 500;
  SharedCounter counter;
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  for (int p = 0; p < kProcesses; ++p)
    if (::fork() == 0) {
      SharedCounter own(::dup(counter.descriptor()));  // as in a process with the inherited descriptor
      for (int i = 0; i < kEach; ++i) {
        const int64_t n = own.next();
        if (::write(ends[1], &n, sizeof n) != sizeof n) ::_exit(1);
      }
      ::_exit(0);
    }
  ::close(ends[1]);
  std::set<int64_t> seen;
  for (int64_t n; ::read(ends[0], &n, sizeof n) == sizeof n;) EXPECT_TRUE(seen.insert(n).second) << n << " twice";
  ::close(ends[0]);
  int status = 0;
  while (::wait(&status) > 0) EXPECT_EQ(status, 0);
  EXPECT_EQ(seen.size(), size_t(kProcesses * kEach));
  EXPECT_EQ(*seen.rbegin(), kProcesses * kEach - 1);
  EXPECT_EQ(counter.next(), kProcesses * kEach);
}

}  // namespace
}  // namespace ingot
