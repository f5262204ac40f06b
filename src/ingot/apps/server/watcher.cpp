#include "ingot/apps/server/watcher.h"

#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <utility>

namespace ingot::server {

Watcher::Watcher(double header_seconds, double body_seconds, std::function<void(const Ticket&)> cancel)
    : header_seconds_(header_seconds), body_seconds_(body_seconds), cancel_(std::move(cancel)) {}
void Watcher::start() {
  thread_ = std::thread([this] { watch(); });
}
void Watcher::stop() {
  watching_ = false;
  if (thread_.joinable()) thread_.join();
}

void Watcher::connected(Connection* c) {
  const std::lock_guard lock(mutex_);
  connections_.insert(c);
}
void Watcher::disconnected(Connection* c) {
  const std::lock_guard lock(mutex_);
  connections_.erase(c);
}
void Watcher::began(Exchange* x) {
  const std::lock_guard lock(mutex_);
  x->connection->busy = true;
  exchanges_.insert(x);
}
void Watcher::ended(Exchange* x) {
  const std::lock_guard lock(mutex_);
  exchanges_.erase(x);
  x->connection->busy = false;
  x->connection->since = Clock::now();
}
void Watcher::answering(Exchange& x, std::shared_ptr<Delivery> delivery, Ticket ticket) {
  const std::lock_guard lock(mutex_);
  x.delivery = std::move(delivery);
  x.ticket = std::move(ticket);
}

bool Watcher::idle() const {
  const std::lock_guard lock(mutex_);
  return exchanges_.empty();
}
std::vector<Watcher::Ticket> Watcher::tickets() const {
  const std::lock_guard lock(mutex_);
  std::vector<Ticket> all;
  for (const Exchange* x : exchanges_)
    if (x->ticket) all.push_back(x->ticket);
  return all;
}
std::vector<std::shared_ptr<Delivery>> Watcher::deliveries() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Delivery>> all;
  for (const Exchange* x : exchanges_)
    if (x->delivery) all.push_back(x->delivery);
  return all;
}

void Watcher::watch() {
  while (watching_) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::vector<Ticket> gone;
    {
      const std::lock_guard lock(mutex_);
      for (Connection* c : connections_)
        if (!c->busy && seconds_since(c->since) > header_seconds_) ::shutdown(c->descriptor, SHUT_RDWR);
      for (Exchange* x : exchanges_) look_at(*x, gone);
    }
    for (const Ticket& ticket : gone) cancel_(ticket);
  }
}
// The library does not poll suspended connections, so this function looks at the socket itself.
void Watcher::look_at(Exchange& x, std::vector<Ticket>& gone) const {
  if (!x.delivery) {
    if (x.post && seconds_since(x.started) > body_seconds_) ::shutdown(x.connection->descriptor, SHUT_RDWR);
    return;
  }
  pollfd p{.fd = x.connection->descriptor, .events = POLLRDHUP};
  ::poll(&p, 1, 0);
  Delivery& d = *x.delivery;
  const std::lock_guard lock(d.mutex);
  const bool late = d.behind && seconds_since(d.behind_since) > d.patience;
  x.connection->set_abrupt(late || (d.behind && !d.ended));
  if (late) ::shutdown(x.connection->descriptor, SHUT_RDWR);
  if (d.ended) return;
  const bool broken = (p.revents & (POLLERR | POLLHUP)) != 0;
  const bool closed = (p.revents & POLLRDHUP) != 0;
  if (broken || (closed && !d.streams)) {
    gone.push_back(x.ticket);
  } else if (d.streams && d.asleep && seconds_since(d.latest) > (closed ? 0.1 : 10)) {
    // A client that closed only its sending direction reads this comment. If the client has disconnected, sending the
    // comment causes an error, which the next check finds. During a long prompt the comment shows that the server is
    // alive.
    d.waiting += ": waiting\n\n";
    d.latest = Clock::now();
    d.wake();
  }
}

}  // namespace ingot::server
