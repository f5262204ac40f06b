#include "ingot/core/comm/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <thread>
#include <utility>

#include "ingot/core/check.h"

namespace ingot {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kPorts = 16;  // tries MASTER_PORT and the following ports, as another program may listen on the first
constexpr double kGreeting = 5;  // seconds for a new connection's greeting
constexpr int64_t kTableLimit = 1 << 20;

double seconds_until(Clock::time_point t) { return std::chrono::duration<double>(t - Clock::now()).count(); }
Clock::time_point in_seconds(double s) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& o) noexcept : descriptor_(std::exchange(o.descriptor_, -1)) {}
  Socket& operator=(Socket&& o) noexcept {
    std::swap(descriptor_, o.descriptor_);
    return *this;
  }
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

bool ready(int descriptor, short events, Clock::time_point until) {
  for (;;) {
    pollfd p{descriptor, events, 0};
    const double left = seconds_until(until);
    const int n = ::poll(&p, 1, left <= 0 ? 0 : int(std::min(left * 1000 + 1, 1e6)));
    if (n > 0) return true;
    if (n == 0 && left <= 0) return false;
    if (n < 0 && errno != EINTR) return false;
  }
}
bool receive_all(int descriptor, void* into, size_t bytes, Clock::time_point until) {
  for (size_t done = 0; done < bytes;) {
    if (!ready(descriptor, POLLIN, until)) return false;
    const ssize_t n = ::recv(descriptor, static_cast<char*>(into) + done, bytes - done, 0);
    if (n > 0) done += size_t(n);
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) return false;
  }
  return true;
}
bool send_all(int descriptor, const void* from, size_t bytes, Clock::time_point until) {
  for (size_t done = 0; done < bytes;) {
    if (!ready(descriptor, POLLOUT, until)) return false;
    const ssize_t n = ::send(descriptor, static_cast<const char*>(from) + done, bytes - done, MSG_NOSIGNAL);
    if (n > 0) done += size_t(n);
    if (n < 0 && errno != EINTR && errno != EAGAIN) return false;
  }
  return true;
}

// The greeting of a rank after connecting. All hosts of a run have the same byte order.
struct Hello {
  char magic[8] = {'I', 'N', 'G', 'O', 'T', 'R', 'K', '1'};
  uint64_t run = 0;
  int32_t world = 0, rank = 0, port = 0, unused = 0;
};
uint64_t run_number(const RankPlace& p) {
  uint64_t h = 0xcbf29ce484222325;
  for (const char c : p.run + "|" + std::to_string(p.port) + "|" + std::to_string(p.world))
    h = (h ^ uint8_t(c)) * 0x100000001b3;
  return h;
}
Hello hello_of(const RankPlace& p, int listening_port) {
  Hello h;
  h.run = run_number(p);
  h.world = p.world;
  h.rank = p.rank;
  h.port = listening_port;
  return h;
}
bool same_run(const Hello& theirs, const Hello& ours) {
  return std::memcmp(theirs.magic, ours.magic, sizeof ours.magic) == 0 && theirs.run == ours.run &&
         theirs.world == ours.world && theirs.rank >= 0 && theirs.rank < ours.world && theirs.rank != ours.rank;
}

std::string host_of_peer(int descriptor) {
  sockaddr_storage a{};
  socklen_t length = sizeof a;
  char text[NI_MAXHOST] = "";
  if (::getpeername(descriptor, reinterpret_cast<sockaddr*>(&a), &length) != 0) return "";
  ::getnameinfo(reinterpret_cast<sockaddr*>(&a), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}
bool is_loopback(const std::string& host) {
  return host.starts_with("127.") || host == "::1" || host.starts_with("::ffff:127.") || host == "localhost";
}
int port_of(int descriptor) {
  sockaddr_storage a{};
  socklen_t length = sizeof a;
  if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&a), &length) != 0) return 0;
  return ntohs(a.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&a)->sin6_port
                                       : reinterpret_cast<sockaddr_in*>(&a)->sin_port);
}

// Port 0 means any free port. Returns no socket where the port is taken.
Socket listen_on(bool loopback, int port) {
  // Without IPv6 on the system, IPv4 alone.
  for (const int family : {loopback ? AF_INET : AF_INET6, AF_INET}) {
    Socket s(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!s) continue;
    const int on = 1, off = 0;
    ::setsockopt(s.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(uint16_t(port));
    v4.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(uint16_t(port));
    if (family == AF_INET6) ::setsockopt(s.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    const int bound = family == AF_INET6 ? ::bind(s.get(), reinterpret_cast<sockaddr*>(&v6), sizeof v6)
                                         : ::bind(s.get(), reinterpret_cast<sockaddr*>(&v4), sizeof v4);
    if (bound == 0 && ::listen(s.get(), 1024) == 0) return s;
  }
  return {};
}

Socket try_connect(const std::string& host, int port, Clock::time_point until) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, ::freeaddrinfo);
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    Socket s(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!s) continue;
    if (::connect(s.get(), a->ai_addr, a->ai_addrlen) != 0 && (errno != EINPROGRESS || !ready(s.get(), POLLOUT, until)))
      continue;
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(s.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error == 0) return s;
  }
  return {};
}

// Accepts the next rank with a greeting; returns no socket when time is up.
Socket accept_rank(int listener, const Hello& ours, Hello& theirs, Clock::time_point until) {
  while (ready(listener, POLLIN, until)) {
    Socket s(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (s && receive_all(s.get(), &theirs, sizeof theirs, std::min(until, in_seconds(kGreeting))) &&
        same_run(theirs, ours))
      return s;  // connections without this greeting are not ranks of this run
  }
  return {};
}

[[noreturn]] void fail_absent(const RankPlace& place, const std::vector<Socket>& links, int first) {
  std::string names;
  int absent = 0;
  for (int r = first; r < place.world; ++r)
    if (r != place.rank && !links[size_t(r)]) {
      names += (names.empty() ? "" : ", ") + std::to_string(r);
      ++absent;
    }
  fail(ErrorCode::io, absent == 1 ? "rank " : "ranks ", names, ": found no connection within ", place.seconds,
       " s, expected all ", place.world, " ranks of the run at ", place.address, ":", place.port);
}

// Rank 0 accepts all ranks, then sends every rank the listening addresses of all ranks.
void gather_ranks(const RankPlace& place, Clock::time_point until, std::vector<Socket>& links) {
  Socket listener(place.listener);
  const bool loopback = is_loopback(place.address);
  for (int i = 0; i < kPorts && !listener; ++i) listener = listen_on(loopback, place.port + i);
  if (!listener)
    fail(ErrorCode::io, "MASTER_PORT: found ports ", place.port, " to ", place.port + kPorts - 1,
         " taken, expected a free one to meet the other ranks at");
  const Hello ours = hello_of(place, 0);
  std::vector<std::string> where(size_t(place.world));
  for (int come = 1; come < place.world;) {
    Hello theirs;
    Socket s = accept_rank(listener.get(), ours, theirs, until);
    if (!s) fail_absent(place, links, 1);
    if (!send_all(s.get(), &ours, sizeof ours, in_seconds(kGreeting))) continue;
    const std::string host = host_of_peer(s.get());
    where[size_t(theirs.rank)] = (is_loopback(host) ? "-" : host) + " " + std::to_string(theirs.port);
    come += !links[size_t(theirs.rank)];
    links[size_t(theirs.rank)] = std::move(s);  // where a rank connected twice, the second connection counts
  }
  std::string table;
  for (const std::string& w : where) table += (w.empty() ? "- 0" : w) + "\n";
  const int64_t bytes = int64_t(table.size());
  for (int r = 1; r < place.world; ++r)
    if (!send_all(links[size_t(r)].get(), &bytes, sizeof bytes, until) ||
        !send_all(links[size_t(r)].get(), table.data(), table.size(), until)) {
      links[size_t(r)] = {};
      fail_absent(place, links, 1);
    }
}

Socket reach_first(const RankPlace& place, const Hello& ours, Clock::time_point until) {
  while (seconds_until(until) > 0) {
    for (int i = 0; i < kPorts; ++i) {
      Socket s = try_connect(place.address, place.port + i, std::min(until, in_seconds(kGreeting)));
      if (!s) continue;
      Hello theirs;
      if (send_all(s.get(), &ours, sizeof ours, in_seconds(kGreeting)) &&
          receive_all(s.get(), &theirs, sizeof theirs, std::min(until, in_seconds(kGreeting))) &&
          same_run(theirs, ours) && theirs.rank == 0)
        return s;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return {};
}

// Every rank but 0 connects to rank 0, then to the ranks below its own, and accepts connections from the ranks above.
void join_ranks(const RankPlace& place, Clock::time_point until, std::vector<Socket>& links) {
  const Socket listener = listen_on(is_loopback(place.address), 0);
  if (!listener) fail(ErrorCode::io, "rank ", place.rank, ": found no free port, expected one for the other ranks");
  const Hello ours = hello_of(place, port_of(listener.get()));
  links[0] = reach_first(place, ours, until);
  int64_t bytes = 0;
  std::string table;
  if (links[0] && receive_all(links[0].get(), &bytes, sizeof bytes, until) && bytes > 0 && bytes < kTableLimit) {
    table.resize(size_t(bytes));
    if (!receive_all(links[0].get(), table.data(), table.size(), until)) table.clear();
  }
  if (table.empty())
    fail(ErrorCode::io, "rank ", place.rank, ": found no answer of rank 0 at ", place.address, ":", place.port,
         " within ", place.seconds, " s, expected all ", place.world, " ranks there");
  std::istringstream lines(table);
  for (int r = 0; r < place.rank; ++r) {
    std::string host;
    int port = 0;
    lines >> host >> port;
    if (r == 0) continue;
    Socket s = try_connect(host == "-" ? place.address : host, port, until);
    if (s && send_all(s.get(), &ours, sizeof ours, until)) links[size_t(r)] = std::move(s);
  }
  for (int r = place.rank + 1; r < place.world; ++r) {
    Hello theirs;
    Socket s = accept_rank(listener.get(), ours, theirs, until);
    if (!s) fail_absent(place, links, 0);
    links[size_t(theirs.rank)] = std::move(s);
  }
  for (int r = 0; r < place.world; ++r)
    if (r != place.rank && !links[size_t(r)]) fail_absent(place, links, 0);
}

int number_in_environment(const char* name, int low, int high) {
  const char* const text = std::getenv(name);
  char* end = nullptr;
  const long n = text != nullptr ? std::strtol(text, &end, 10) : -1;
  if (text == nullptr || *text == 0 || *end != 0 || n < low || n > high)
    fail(ErrorCode::usage, name, ": found ", text != nullptr ? std::string("'") + text + "'" : "nothing",
         ", expected a number from ", low, " to ", high, ", as torchrun sets it");
  return int(n);
}
std::string text_in_environment(const char* name) {
  const char* const text = std::getenv(name);
  return text != nullptr ? text : "";
}

}  // namespace

RankPlace rank_place_from_environment() {
  RankPlace p;
  if (text_in_environment("RANK").empty() && text_in_environment("WORLD_SIZE").empty()) return p;
  p.world = number_in_environment("WORLD_SIZE", 1, 4096);
  p.rank = number_in_environment("RANK", 0, p.world - 1);
  if (p.world == 1) return p;
  p.local_rank = number_in_environment("LOCAL_RANK", 0, p.world - 1);
  p.local_world = text_in_environment("LOCAL_WORLD_SIZE").empty()
                      ? p.world
                      : number_in_environment("LOCAL_WORLD_SIZE", p.local_rank + 1, p.world);
  p.port = number_in_environment("MASTER_PORT", 1, 65535 - kPorts);
  p.address = text_in_environment("MASTER_ADDR");
  if (p.address.empty()) fail(ErrorCode::usage, "MASTER_ADDR: found nothing, expected the host of rank 0");
  p.run = text_in_environment("TORCHELASTIC_RUN_ID") + text_in_environment("TORCHELASTIC_RESTART_COUNT");
  if (text_in_environment("TORCHELASTIC_USE_AGENT_STORE") == "True")
    ++p.port;  // torchrun itself listens on the first port
  return p;
}

LocalListener listen_locally() {
  Socket s = listen_on(true, 0);
  if (!s) fail(ErrorCode::io, "found no free port on the loopback interface, expected one for the ranks to meet at");
  const int port = port_of(s.get());
  return {s.release(), port};
}

std::vector<int> connect_ranks(const RankPlace& place) {
  std::vector<Socket> links(size_t(place.world));
  const Clock::time_point until = in_seconds(place.seconds);
  if (place.rank == 0)
    gather_ranks(place, until, links);
  else
    join_ranks(place, until, links);
  std::vector<int> sockets;
  for (Socket& s : links) {
    const int on = 1;
    if (s) ::setsockopt(s.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (s) ::setsockopt(s.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    sockets.push_back(s.release());
  }
  return sockets;
}

}  // namespace ingot
