#pragma once
// All connections and requests of a server, and a thread that ends those of clients that have disconnected or take too
// long.
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "ingot/apps/server/exchange.h"

namespace ingot::server {

class Watcher {
 public:
  using Ticket = std::shared_ptr<Service::Ticket>;

  // `cancel` is called on the watcher's thread for an answer whose client has disconnected.
  Watcher(double header_seconds, double body_seconds, std::function<void(const Ticket&)> cancel);
  ~Watcher() { stop(); }
  void start();
  void stop();

  void connected(Connection* c);
  void disconnected(Connection* c);
  void began(Exchange* x);  // marks its connection as busy
  void ended(Exchange* x);
  // The exchange waits for an answer from now on.
  void answering(Exchange& x, std::shared_ptr<Delivery> delivery, Ticket ticket);

  bool idle() const;  // no request is under way
  std::vector<Ticket> tickets() const;
  std::vector<std::shared_ptr<Delivery>> deliveries() const;

 private:
  void watch();
  void look_at(Exchange& x, std::vector<Ticket>& gone) const;

  const double header_seconds_, body_seconds_;
  const std::function<void(const Ticket&)> cancel_;
  mutable std::mutex mutex_;
  std::set<Connection*> connections_;
  std::set<Exchange*> exchanges_;
  std::atomic<bool> watching_ = true;
  std::thread thread_;
};

}  // namespace ingot::server
