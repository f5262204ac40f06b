#include "ingot/apps/cli/shared/ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/framework/interrupt.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/clock.h"
#include "ingot/core/cpu/shared_counter.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/log.h"
#include "ingot/gpu/device.h"
#include "ingot/io/json.h"

extern char** environ;

namespace ingot::cli {
namespace {

constexpr double kGrace = 5;  // seconds in which the other ranks can report their errors after one rank has ended
constexpr const char *kListener = "INGOT_RANK_LISTENER", *kReport = "INGOT_RANK_REPORT", *kStop = "INGOT_RANK_STOP",
                     *kCounter = "INGOT_RANK_COUNTER";

// The ends of a pipe, closed by the destructor.
struct Pipe {
  Pipe() {
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail(ErrorCode::io, "ranks: a pipe: ", std::strerror(errno));
  }
  Pipe(const Pipe&) = delete;
  ~Pipe() { close(0), close(1); }
  void close(size_t end) {
    if (ends[end] >= 0) ::close(std::exchange(ends[end], -1));
  }
  int out() const { return ends[0]; }
  int in() const { return ends[1]; }
  std::array<int, 2> ends{-1, -1};
};

struct ReportedError {
  bool lost = false;
  ErrorCode code = ErrorCode::io;
  std::string message;
};

// A child process as seen by its parent.
struct Rank {
  Pipe reports, stop;
  pid_t process = -1;
  std::string heard;  // the part of its reports read so far
  bool training = false, ended = false, ended_by_us = false;
  int status = 0;  // as returned by waitpid
  std::optional<ReportedError> reported;

  bool failed() const { return ended && status != 0; }
  bool was_killed() const { return ended && WIFSIGNALED(status) && !ended_by_us; }
  void listen() {
    char bytes[4096];
    for (ssize_t n; (n = ::read(reports.out(), bytes, sizeof bytes)) > 0;) heard.append(bytes, size_t(n));
    for (size_t end; (end = heard.find('\n')) != std::string::npos; heard.erase(0, end + 1)) {
      const std::string line = heard.substr(0, end);
      if (line == "training") {
        training = true;
        continue;
      }
      const Json j = parse_json(line, "a rank's report");
      reported = ReportedError{j.value("lost", false), ErrorCode(j.value("code", 0)), j.value("message", "")};
    }
  }
  void look() {
    listen();
    if (ended || ::waitpid(process, &status, WNOHANG) != process) return;
    ended = true;
    listen();  // reads its last reports
  }
  void kill() {
    if (ended) return;
    ended_by_us = true;
    ::kill(process, SIGKILL);
  }
};

std::vector<std::string> environment_of(int rank, int count, const LocalListener& meet, const SharedCounter& counter,
                                        const Rank& r) {
  const auto is_set = [](const char* name) { return std::getenv(name) != nullptr; };
  std::vector<std::string> all{"RANK=" + std::to_string(rank),
                               "LOCAL_RANK=" + std::to_string(rank),
                               "LOCAL_WORLD_SIZE=" + std::to_string(count),
                               "WORLD_SIZE=" + std::to_string(count),
                               "MASTER_ADDR=127.0.0.1",
                               "MASTER_PORT=" + std::to_string(meet.port),
                               std::string(kReport) + "=" + std::to_string(r.reports.in()),
                               std::string(kStop) + "=" + std::to_string(r.stop.out()),
                               std::string(kCounter) + "=" + std::to_string(counter.descriptor())};
  if (rank == 0) all.push_back(std::string(kListener) + "=" + std::to_string(meet.descriptor));
  // The ranks share the CPUs, and only rank 0 logs.
  if (!is_set("INGOT_THREADS")) all.push_back("INGOT_THREADS=" + std::to_string(std::max(1, thread_count() / count)));
  if (rank > 0 && !is_set("INGOT_LOG")) all.push_back("INGOT_LOG=error");
  const size_t ours = all.size();
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string variable = *e, name = variable.substr(0, variable.find('=') + 1);
    if (std::none_of(all.begin(), all.begin() + int64_t(ours), [&](const auto& o) { return o.starts_with(name); }))
      all.push_back(variable);
  }
  return all;
}

std::vector<std::string> own_words() {
  std::vector<std::string> words;
  const int file = ::open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  std::string all;
  char bytes[4096];
  for (ssize_t n; file >= 0 && (n = ::read(file, bytes, sizeof bytes)) > 0;) all.append(bytes, size_t(n));
  if (file >= 0) ::close(file);
  for (size_t at = 0; at < all.size(); at = all.find('\0', at) + 1) words.emplace_back(all.c_str() + at);
  if (words.empty()) fail(ErrorCode::unsupported, "ranks: found no /proc/self/cmdline, expected it to start them");
  return words;
}

std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& w : words) all.push_back(w.data());
  all.push_back(nullptr);
  return all;
}

void start(Rank& r, int rank, int count, const LocalListener& meet, const SharedCounter& counter) {
  std::vector<std::string> words = own_words(), variables = environment_of(rank, count, meet, counter, r);
  const std::vector<char*> arguments = pointers_to(words), environment = pointers_to(variables);
  r.process = ::fork();
  if (r.process < 0) fail(ErrorCode::io, "ranks: rank ", rank, " cannot be started: ", std::strerror(errno));
  if (r.process == 0) {
    // Only async-signal-safe functions until exec. The parent handles signals, which a terminal sends to all processes.
    ::signal(SIGINT, SIG_IGN), ::signal(SIGTERM, SIG_IGN);
    ::fcntl(r.reports.in(), F_SETFD, 0), ::fcntl(r.stop.out(), F_SETFD, 0);
    ::fcntl(counter.descriptor(), F_SETFD, 0);
    if (rank == 0) ::fcntl(meet.descriptor, F_SETFD, 0);
    ::execve("/proc/self/exe", arguments.data(), environment.data());
    ::_exit(127);
  }
  r.reports.close(1), r.stop.close(0);
  ::fcntl(r.reports.out(), F_SETFL, O_NONBLOCK);
}

using Ranks = std::vector<std::unique_ptr<Rank>>;
bool all_ended(const Ranks& ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [](const auto& r) { return r->ended; });
}
void kill_all(const Ranks& ranks) {
  for (const auto& r : ranks) r->kill();
}

// Waits until all processes have ended.
void watch(const Ranks& ranks, const Interrupt& interrupt) {
  std::optional<Clock::time_point> first_failure;
  bool asked = false;
  while (!all_ended(ranks)) {
    ::poll(nullptr, 0, 20);
    for (const auto& r : ranks) r->look();
    if (interrupt.asked() && !asked) {
      asked = true;
      for (const auto& r : ranks) r->stop.close(1);
      if (!ranks[0]->training) kill_all(ranks);  // nothing to save yet
    }
    const bool failed = std::any_of(ranks.begin(), ranks.end(), [](const auto& r) { return r->failed(); });
    if (failed && !first_failure) first_failure = Clock::now();
    if (first_failure && seconds_since(*first_failure) > kGrace) kill_all(ranks);
  }
}

[[noreturn]] void fail_with_advice(const std::string& message, const std::function<std::string()>& advice) {
  const std::string more = advice ? advice() : "";
  fail(ErrorCode::io, message, more.empty() ? "" : "; ", more);
}

// Chooses the message to report: first that a rank was killed, then the report of a rank about itself (rank 0 before
// all other ranks), then a report about a rank that does not answer.
void judge(const Ranks& ranks, bool interrupted, const std::function<std::string()>& advice) {
  for (size_t r = 0; r < ranks.size(); ++r)
    if (ranks[r]->was_killed()) {
      const int signal = WTERMSIG(ranks[r]->status);
      fail_with_advice(detail::concat("rank ", r, " of ", ranks.size(), " was ended by signal ", signal, " (",
                                      strsignal(signal), "), expected it to come to the end"),
                       advice);
    }
  for (size_t r = 0; r < ranks.size(); ++r)
    if (const auto& reported = ranks[r]->reported; reported && !reported->lost)
      fail(reported->code, r == 0 ? "" : detail::concat("rank ", r, ": "), reported->message);
  for (const auto& r : ranks)
    if (r->reported) fail_with_advice(r->reported->message, advice);
  if (interrupted && std::any_of(ranks.begin(), ranks.end(), [](const auto& r) { return r->ended_by_us; }))
    fail(ErrorCode::interrupted, "stopped by a signal");
  for (size_t r = 0; r < ranks.size(); ++r)
    if (ranks[r]->failed())
      fail(ErrorCode::io, "rank ", r, " of ", ranks.size(), ": found status ", WEXITSTATUS(ranks[r]->status),
           ", expected 0");
}

int descriptor_in_environment(const char* name) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != 0 ? std::atoi(text) : -1;
}
void report(const std::string& line) {
  const std::string bytes = line + "\n";
  [[maybe_unused]] const ssize_t n = ::write(descriptor_in_environment(kReport), bytes.data(), bytes.size());
}

}  // namespace

void start_ranks(int count, const std::function<std::string()>& advice) {
  const LocalListener meet = listen_locally();
  const SharedCounter counter;
  Ranks ranks;
  const Interrupt interrupt;
  try {
    for (int r = 0; r < count; ++r) {
      ranks.push_back(std::make_unique<Rank>());
      start(*ranks.back(), r, count, meet, counter);
    }
  } catch (const Error&) {
    for (const auto& r : ranks)
      if (r->process > 0) r->kill();
    throw;
  }
  ::close(meet.descriptor);
  watch(ranks, interrupt);
  judge(ranks, interrupt.asked(), advice);
}

bool was_started() { return descriptor_in_environment(kReport) >= 0; }
int inherited_listener() { return descriptor_in_environment(kListener); }
int inherited_counter() { return descriptor_in_environment(kCounter); }
void report_training_begun() {
  if (was_started()) report("training");
}
bool asked_to_stop() {
  // The parent closes its end of the pipe to request a stop, or by ending.
  pollfd p{descriptor_in_environment(kStop), POLLIN, 0};
  return p.fd >= 0 && ::poll(&p, 1, 0) > 0 && (p.revents & (POLLHUP | POLLIN)) != 0;
}
Device device_of_rank(const GptConfig& config, DeviceChoice device, const RankPlace* place) {
  if (place == nullptr) return training_device(config, device);
  const int ranks = place->local_world, gpus = gpu::device_count();
  if (gpus < ranks && device == DeviceChoice::cuda)
    fail(ErrorCode::unsupported, "found ", gpus, gpus == 1 ? " GPU" : " GPUs", ", expected one for each of ", ranks,
         " ranks");
  if (gpus < ranks && gpus > 0 && device == DeviceChoice::automatic && place->rank == 0)
    log_info("on the CPU: found ", gpus, gpus == 1 ? " GPU" : " GPUs", ", expected one for each of ", ranks, " ranks");
  Device chosen = training_device(config, gpus < ranks ? DeviceChoice::cpu : device);
  if (chosen.kind == Device::cuda) chosen.index = place->local_rank;
  return chosen;
}
void hand_over(const Error& e, bool lost) {
  if (!was_started()) return;
  OrderedJson j;
  j["lost"] = lost;
  j["code"] = int(e.code);
  j["message"] = e.what();
  report(show_json(j));
  ::_exit(exit_status(e.code));
}

}  // namespace ingot::cli
