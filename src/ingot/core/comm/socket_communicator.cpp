#include "ingot/core/comm/socket_communicator.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ingot/core/clock.h"
#include "ingot/core/cpu/thread_pool.h"

namespace ingot {
namespace {

enum class Call : uint32_t { all_reduce, reduce_scatter, all_gather, broadcast, gather_bytes, barrier, roll, goodbye };
const char* name_of(Call c) {
  constexpr const char* kNames[] = {"all_reduce",   "reduce_scatter", "all_gather", "broadcast",
                                    "gather_bytes", "barrier",        "roll call",  "goodbye"};
  return uint32_t(c) <= uint32_t(Call::goodbye) ? kNames[uint32_t(c)] : "something unknown";
}

// The header before a rank's bytes for a call, so that ranks in different calls notice the difference at once.
struct Frame {
  uint32_t magic = 0x4b4e5249;
  Call call = Call::barrier;
  uint64_t number = 0;  // the number of the call in the run
  int64_t bytes = 0;    // bytes after the header
};
constexpr int64_t kMostWords = 4096;  // largest size of a farewell message, in bytes
constexpr int64_t kSmall = 16 << 10;  // up to this many bytes, every rank sends its data directly to all ranks
constexpr double kRollCallSeconds = 10;
constexpr double kPartingSeconds = 1;
constexpr int64_t kSumGrain = 1 << 15;

// The transfers to and from a rank in a step of a call. A negative size means no transfer, not even a header.
struct Transfer {
  int peer = 0;
  const void* send = nullptr;
  int64_t send_bytes = -1;
  void* receive = nullptr;
  int64_t receive_bytes = -1;
};

// A transfer in progress.
struct Flow {
  Flow(const Transfer& transfer, Call call, uint64_t number)
      : t(transfer), out{.call = call, .number = number, .bytes = transfer.send_bytes} {}
  bool sends() const { return t.send_bytes >= 0 && sent < int64_t(sizeof out) + t.send_bytes; }
  bool receives() const { return t.receive_bytes >= 0 && received < int64_t(sizeof in) + t.receive_bytes; }
  bool in_midst_of_frame() const { return sent > 0 && sends(); }

  Transfer t;
  Frame out, in;
  int64_t sent = 0, received = 0;  // bytes so far, the header included
  Clock::time_point heard = Clock::now();
};

}  // namespace

Parts even_parts(int64_t n, int world) {
  Parts p{0};
  for (int r = 0; r < world; ++r) p.push_back(p.back() + n / world + (r < n % world));
  return p;
}

struct SocketCommunicator::Impl {
  int rank, world;
  double deadline;
  std::vector<int> sockets;
  uint64_t calls = 0;
  std::vector<char> scratch;
  std::vector<int> notified;  // ranks with a sent, perhaps unread, message with this rank's reason for leaving

  std::vector<int> others() const {
    std::vector<int> all;
    for (int r = 0; r < world; ++r)
      if (r != rank) all.push_back(r);
    return all;
  }

  // --- the end of a run
  // Sends the reason to all connected ranks, so that every rank reports the same reason, then throws.
  [[noreturn]] void lose(const std::vector<int>& lost, const std::vector<Flow>& flows, const std::string& message) {
    const std::string words = message.substr(0, size_t(kMostWords));
    const Frame bye{.call = Call::goodbye, .number = calls, .bytes = int64_t(words.size())};
    std::string all(reinterpret_cast<const char*>(&bye), sizeof bye);
    all += words;
    for (const int r : others()) {
      const bool midst = std::any_of(flows.begin(), flows.end(),
                                     [&](const Flow& f) { return f.t.peer == r && f.in_midst_of_frame(); });
      if (std::find(lost.begin(), lost.end(), r) != lost.end()) continue;
      // In the middle of a transfer the already sent header is enough.
      if (!midst) [[maybe_unused]]
        const ssize_t n = ::send(sockets[size_t(r)], all.data(), all.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      notified.push_back(r);
    }
    throw LostRank(message);
  }
  // Reads before the connections close. Closing a connection with unread bytes resets the connection, and the peer
  // would find the reset in place of the reason. Therefore this rank reads all arriving bytes until the peer has closed
  // its end, for at most kPartingSeconds.
  void part() {
    for (const int r : notified) ::shutdown(sockets[size_t(r)], SHUT_WR);
    std::vector<char> unread(notified.empty() ? 0 : kSmall);
    const Clock::time_point begin = Clock::now();
    while (!notified.empty() && seconds_since(begin) < kPartingSeconds) {
      std::vector<pollfd> polls;
      for (const int r : notified) polls.push_back({sockets[size_t(r)], POLLIN, 0});
      ::poll(polls.data(), nfds_t(polls.size()), 100);  // ms; the loop checks the clock
      std::erase_if(notified, [&](int r) {
        const ssize_t n = ::recv(sockets[size_t(r)], unread.data(), unread.size(), MSG_DONTWAIT);
        return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
      });
    }
  }
  [[noreturn]] void lose_one(const Flow& f, const std::vector<Flow>& flows, const std::string& found) {
    lose({f.t.peer}, flows,
         detail::concat("rank ", f.t.peer, " went away: found ", found, " at call ", calls, ", ", name_of(f.out.call),
                        ", expected all ", world, " ranks of the run"));
  }
  static double grace_of(double seconds) { return std::clamp(seconds / 4, 0.25, 10.0); }
  static std::vector<int> silent_of(const std::vector<Flow>& flows, double seconds) {
    std::vector<int> silent;
    for (const Flow& f : flows)
      if ((f.sends() || f.receives()) && seconds_since(f.heard) > 0.9 * seconds) silent.push_back(f.t.peer);
    return silent;
  }
  [[noreturn]] void lose_silent(const std::vector<Flow>& flows, double seconds) {
    const std::vector<int> silent = silent_of(flows, seconds);
    std::string names;
    for (const int r : silent) names += (names.empty() ? "" : ", ") + std::to_string(r);
    lose(silent, flows,
         detail::concat(silent.size() == 1 ? "rank " : "ranks ", names,
                        silent.size() == 1 ? " does not answer" : " do not answer", ": found no byte for ", seconds,
                        " s at call ", calls, ", ", name_of(flows.front().out.call), ", expected all ", world,
                        " ranks of the run"));
  }
  // Another rank knows more about the lost rank than this rank.
  [[noreturn]] void take_leave(const Flow& f) {
    std::string words(size_t(std::clamp<int64_t>(f.in.bytes, 0, kMostWords)), ' ');
    pollfd p{sockets[size_t(f.t.peer)], POLLIN, 0};
    ::poll(&p, 1, 1000);
    const ssize_t n = ::recv(p.fd, words.data(), words.size(), MSG_DONTWAIT);
    words.resize(size_t(std::max<ssize_t>(n, 0)));
    throw LostRank(words.empty() ? detail::concat("rank ", f.t.peer, " gave up") : words);
  }

  // --- a step of a call
  void check_frame(const Flow& f, const std::vector<Flow>& flows) {
    if (f.in.magic == f.out.magic && f.in.call == Call::goodbye) take_leave(f);
    if (f.in.magic == f.out.magic && f.in.call == f.out.call && f.in.number == f.out.number &&
        f.in.bytes == f.t.receive_bytes)
      return;
    lose({}, flows,
         detail::concat("rank ", f.t.peer, ": found it at call ", f.in.number, ", ", name_of(f.in.call), " of ",
                        f.in.bytes, " bytes, expected call ", f.out.number, ", ", name_of(f.out.call), " of ",
                        f.t.receive_bytes, " bytes, as on rank ", rank));
  }
  void send_some(Flow& f, const std::vector<Flow>& flows) {
    const int64_t head = int64_t(sizeof f.out);
    const char* const from = f.sent < head ? reinterpret_cast<const char*>(&f.out) + f.sent
                                           : static_cast<const char*>(f.t.send) + (f.sent - head);
    const int64_t left = f.sent < head ? head - f.sent : head + f.t.send_bytes - f.sent;
    const int more = f.sent < head && f.t.send_bytes > 0 ? MSG_MORE : 0;
    const ssize_t n = ::send(sockets[size_t(f.t.peer)], from, size_t(left), MSG_NOSIGNAL | MSG_DONTWAIT | more);
    if (n > 0) f.sent += n, f.heard = Clock::now();
    // A message sent by the rank before its end comes first.
    if (n < 0 && errno != EAGAIN && errno != EINTR && !f.receives()) lose_one(f, flows, std::strerror(errno));
    if (n < 0 && errno != EAGAIN && errno != EINTR) f.t.send_bytes = -1;
  }
  void receive_some(Flow& f, const std::vector<Flow>& flows) {
    const int64_t head = int64_t(sizeof f.in);
    char* const into = f.received < head ? reinterpret_cast<char*>(&f.in) + f.received
                                         : static_cast<char*>(f.t.receive) + (f.received - head);
    const int64_t left = f.received < head ? head - f.received : head + f.t.receive_bytes - f.received;
    const ssize_t n = ::recv(sockets[size_t(f.t.peer)], into, size_t(left), MSG_DONTWAIT);
    if (n == 0) lose_one(f, flows, "its connection closed");
    if (n < 0 && errno != EAGAIN && errno != EINTR) lose_one(f, flows, std::strerror(errno));
    if (n <= 0) return;
    f.heard = Clock::now();
    const bool head_was_open = f.received < head;
    f.received += n;
    if (head_was_open && f.received >= head) check_frame(f, flows);
  }
  void exchange(Call call, const std::vector<Transfer>& transfers, double seconds) {
    std::vector<Flow> flows;
    for (const Transfer& t : transfers) flows.emplace_back(t, call, calls);
    std::vector<pollfd> polls;
    std::vector<Flow*> open;
    for (;;) {
      polls.clear(), open.clear();
      double waited = 0;
      for (Flow& f : flows) {
        if (!f.sends() && !f.receives()) continue;
        const short events = short((f.sends() ? POLLOUT : 0) | (f.receives() ? POLLIN : 0));
        polls.push_back({sockets[size_t(f.t.peer)], events, 0});
        open.push_back(&f);
        waited = std::max(waited, seconds_since(f.heard));
      }
      if (open.empty()) return;
      // A silent rank may itself be waiting for a third rank. Among several silent ranks, the living ranks reach their
      // own deadline too and report the awaited rank, so their report is more precise than this rank's.
      if (waited > seconds && (silent_of(flows, seconds).size() == 1 || waited > seconds + grace_of(seconds)))
        lose_silent(flows, seconds);
      const int patience = int(std::clamp((seconds - waited) * 1000 + 1, 10.0, 1000.0));
      if (::poll(polls.data(), nfds_t(polls.size()), patience) < 0 && errno != EINTR)
        fail(ErrorCode::io, "ranks: ", std::strerror(errno));
      for (size_t i = 0; i < open.size(); ++i) {
        const short got = polls[i].revents;
        if ((got & (POLLIN | POLLHUP | POLLERR)) != 0 && open[i]->receives()) receive_some(*open[i], flows);
        if ((got & (POLLOUT | POLLHUP | POLLERR)) != 0 && open[i]->sends()) send_some(*open[i], flows);
      }
    }
  }

  // --- sums
  void* scratch_of(int64_t bytes) {
    if (int64_t(scratch.size()) < bytes) scratch.resize(size_t(bytes));
    return scratch.data();
  }
  // x = the sum over ranks in their order. This rank's numbers are in x; the numbers of all further ranks are the
  // consecutive rows of `rows`.
  template <class T> void add_in_order(T* x, const T* rows, int64_t n) const {
    parallel_for(n, kSumGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T total = rank == 0 ? x[i] : rows[i];
        for (int r = 1; r < world; ++r) total += r == rank ? x[i] : rows[(r < rank ? r : r - 1) * n + i];
        x[i] = total;
      }
    });
  }
  void add_in_order(const Tensor& x, const void* rows) const {
    if (x.dtype == DType::f64)
      add_in_order(x.ptr<double>(), static_cast<const double*>(rows), x.numel());
    else
      add_in_order(x.ptr<float>(), static_cast<const float*>(rows), x.numel());
  }

  // --- calls
  void check(const Tensor& x, const char* call) const {
    INGOT_CHECK(x.device.kind == Device::cpu, call, ": found a tensor on ", x.device, ", expected host memory");
    INGOT_CHECK(x.dtype == DType::f32 || x.dtype == DType::f64, call, ": found dtype ", x.dtype,
                ", expected f32 or f64");
    INGOT_CHECK(x.rank() == 1 && x.contiguous(), call, ": found shape ", x.shape,
                ", expected one contiguous dimension");
  }
  void check(const Tensor& x, const Parts& parts, const char* call) const {
    check(x, call);
    INGOT_CHECK_EQ(int64_t(parts.size()), int64_t(world) + 1, call, ": parts");
    INGOT_CHECK(parts.front() == 0 && parts.back() == x.numel() && std::is_sorted(parts.begin(), parts.end()), call,
                ": found parts from ", parts.front(), " to ", parts.back(), ", expected ascending ones from 0 to ",
                x.numel());
  }
  static char* at(const Tensor& x, int64_t i) { return static_cast<char*>(x.data) + i * int64_t(size_of(x.dtype)); }

  void reduce_scatter(Call call, const Tensor& x, const Parts& parts) {
    const int64_t size = size_of(x.dtype), mine = parts[size_t(rank) + 1] - parts[size_t(rank)];
    char* const rows = static_cast<char*>(scratch_of(mine * size * (world - 1)));
    std::vector<Transfer> all;
    for (const int r : others())
      all.push_back({.peer = r,
                     .send = at(x, parts[size_t(r)]),
                     .send_bytes = (parts[size_t(r) + 1] - parts[size_t(r)]) * size,
                     .receive = rows + int64_t(all.size()) * mine * size,
                     .receive_bytes = mine * size});
    exchange(call, all, deadline);
    add_in_order(x.slice(0, parts[size_t(rank)], parts[size_t(rank) + 1]), rows);
  }
  void all_gather(Call call, const Tensor& x, const Parts& parts) {
    const int64_t size = size_of(x.dtype);
    std::vector<Transfer> all;
    for (const int r : others())
      all.push_back({.peer = r,
                     .send = at(x, parts[size_t(rank)]),
                     .send_bytes = (parts[size_t(rank) + 1] - parts[size_t(rank)]) * size,
                     .receive = at(x, parts[size_t(r)]),
                     .receive_bytes = (parts[size_t(r) + 1] - parts[size_t(r)]) * size});
    exchange(call, all, deadline);
  }
  void all_reduce(const Tensor& x) {
    if (x.bytes() > kSmall) {
      const Parts parts = even_parts(x.numel(), world);
      reduce_scatter(Call::all_reduce, x, parts);
      all_gather(Call::all_reduce, x, parts);
      return;
    }
    char* const rows = static_cast<char*>(scratch_of(x.bytes() * (world - 1)));
    std::vector<Transfer> all;
    for (const int r : others())
      all.push_back({.peer = r,
                     .send = x.data,
                     .send_bytes = x.bytes(),
                     .receive = rows + int64_t(all.size()) * x.bytes(),
                     .receive_bytes = x.bytes()});
    exchange(Call::all_reduce, all, deadline);
    add_in_order(x, rows);
  }
  void broadcast(void* data, int64_t bytes, int root) {
    INGOT_CHECK(root >= 0 && root < world, "broadcast: found root ", root, ", expected 0 to ", world - 1);
    std::vector<Transfer> all;
    if (rank == root)
      for (const int r : others()) all.push_back({.peer = r, .send = data, .send_bytes = bytes});
    else
      all.push_back({.peer = root, .receive = data, .receive_bytes = bytes});
    exchange(Call::broadcast, all, deadline);
  }
  void gather_bytes(Call call, const void* mine, int64_t bytes, void* into, double seconds) {
    std::vector<Transfer> all;
    for (const int r : others())
      all.push_back({.peer = r,
                     .send = mine,
                     .send_bytes = bytes,
                     .receive = static_cast<char*>(into) + r * bytes,
                     .receive_bytes = bytes});
    exchange(call, all, seconds);
    if (bytes > 0) std::memcpy(static_cast<char*>(into) + rank * bytes, mine, size_t(bytes));
  }
};

SocketCommunicator::SocketCommunicator(const RankPlace& place, double deadline)
    : impl_(new Impl{place.rank, place.world, deadline, {}, 0, {}, {}}) {
  INGOT_CHECK(deadline > 0, "ranks: found a deadline of ", deadline, " s, expected more than 0");
  if (place.world > 1) impl_->sockets = connect_ranks(place);
}
SocketCommunicator::~SocketCommunicator() {
  impl_->part();
  for (const int s : impl_->sockets)
    if (s >= 0) ::close(s);
}
int SocketCommunicator::rank() const { return impl_->rank; }
int SocketCommunicator::world() const { return impl_->world; }
double SocketCommunicator::deadline() const { return impl_->deadline; }

void SocketCommunicator::all_reduce(const Tensor& x, Stream) {
  impl_->check(x, "all_reduce");
  ++impl_->calls;
  impl_->all_reduce(x);
}
void SocketCommunicator::reduce_scatter(const Tensor& x, const Parts& parts, Stream) {
  impl_->check(x, parts, "reduce_scatter");
  ++impl_->calls;
  impl_->reduce_scatter(Call::reduce_scatter, x, parts);
}
void SocketCommunicator::all_gather(const Tensor& x, const Parts& parts, Stream) {
  impl_->check(x, parts, "all_gather");
  ++impl_->calls;
  impl_->all_gather(Call::all_gather, x, parts);
}
void SocketCommunicator::broadcast(const Tensor& x, int root, Stream) {
  impl_->check(x, "broadcast");
  ++impl_->calls;
  impl_->broadcast(x.data, x.bytes(), root);
}
void SocketCommunicator::gather_bytes(const void* mine, int64_t bytes, void* all) {
  ++impl_->calls;
  impl_->gather_bytes(Call::gather_bytes, mine, bytes, all, impl_->deadline);
}
void SocketCommunicator::broadcast_bytes(void* data, int64_t bytes, int root) {
  ++impl_->calls;
  impl_->broadcast(data, bytes, root);
}
void SocketCommunicator::barrier(double seconds) {
  ++impl_->calls;
  impl_->gather_bytes(Call::barrier, nullptr, 0, nullptr, seconds);
}

void SocketCommunicator::check_alive() {
  for (const int r : impl_->others()) {
    pollfd p{impl_->sockets[size_t(r)], POLLRDHUP, 0};
    Frame head;
    const ssize_t n = ::recv(p.fd, &head, sizeof head, MSG_PEEK | MSG_DONTWAIT);
    if (n == ssize_t(sizeof head) && head.call == Call::goodbye) {
      Flow f({.peer = r}, Call::roll, impl_->calls);
      [[maybe_unused]] const ssize_t taken = ::recv(p.fd, &f.in, sizeof f.in, MSG_DONTWAIT);
      impl_->take_leave(f);
    }
    if (n != 0 && (::poll(&p, 1, 0) <= 0 || (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0)) continue;
    impl_->lose({r}, {},
                detail::concat("rank ", r, " went away: found its connection closed, expected all ", impl_->world,
                               " ranks of the run"));
  }
}

void SocketCommunicator::fail_by_roll_call(const std::string& what) {
  ++impl_->calls;
  std::vector<char> all(size_t(impl_->world));
  const char here = 1;
  // A running rank reaches its own deadline at about the same time.
  impl_->gather_bytes(Call::roll, &here, 1, all.data(), kRollCallSeconds);
  impl_->lose({}, {}, what);
}

}  // namespace ingot
