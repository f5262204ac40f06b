#pragma once
// The HTTP server of a Service, on libmicrohttpd: routes, keys, limits, streams, and clients that disconnect.
#include <memory>
#include <string>
#include <vector>

#include "ingot/engines/serve/service.h"

namespace ingot::server {

struct ServerOptions {
  std::string host = "127.0.0.1";
  int port = 8080;                   // 0: any free port
  std::vector<std::string> keys;     // none: requests need no key
  std::vector<std::string> hosts;    // host names that requests may use, without port; empty: any
  std::vector<std::string> origins;  // origins whose pages may send requests, as browsers spell origins
  ApiLimits limits;
  int connections = 256;
  int connections_of_one = 0;  // from one address; 0: no limit
  double header_seconds = 30;  // for a complete request header, counted from the connection or the last answer
  double body_seconds = 30;
  double stall_seconds = 30;  // without progress of a transfer, or for a slow reader to catch up
};

class Server {
 public:
  // Listens; until serve() every request is answered with 503. Error{busy} if the port is in use.
  explicit Server(const ServerOptions& options);
  ~Server();  // ends the remaining answers
  Server(const Server&) = delete;
  // The service must live until stop().
  void serve(Service& service);
  int port() const;
  // Accepts no more requests, waits for the answers under way, and cancels the rest after this time. True: nothing had
  // to be cancelled.
  bool stop(double seconds);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot::server
