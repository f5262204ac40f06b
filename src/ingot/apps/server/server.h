#pragma once
// HTTP for a Service, on libmicrohttpd: routes, keys, limits, streams, and what becomes of clients that go away.
#include <memory>
#include <string>
#include <vector>

#include "ingot/engines/serve/service.h"

namespace ingot::server {

struct ServerOptions {
  std::string host = "127.0.0.1";
  int port = 8080;                   // 0: any that is free
  std::vector<std::string> keys;     // none: everybody may ask
  std::vector<std::string> hosts;    // names that a request may call this server by, without port; empty: any
  std::vector<std::string> origins;  // pages of other origins that may ask, as browsers spell them
  ApiLimits limits;
  int connections = 256;
  int connections_of_one = 0;  // from one address; 0: no limit
  double header_seconds = 30;  // for a request's whole header, from the connection or the last answer
  double body_seconds = 30;
  double stall_seconds = 30;  // without a byte moving, or for a reader to catch up
};

class Server {
 public:
  // Listens; until serve() everything is answered with 503. Error{busy} where the port is taken.
  explicit Server(const ServerOptions& options);
  ~Server();  // ends what is left of the answers
  Server(const Server&) = delete;
  // The service must live until stop().
  void serve(Service& service);
  int port() const;
  // No more requests; waits so long for answers under way, then cancels the rest. True: none had to be.
  bool stop(double seconds);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot::server
