#pragma once
// A connection of the server, and a request with its reply on this connection.
#include <microhttpd.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ingot/apps/server/delivery.h"
#include "ingot/core/clock.h"
#include "ingot/engines/serve/service.h"

namespace ingot::server {

// A connection, idle between two requests or busy with one request.
struct Connection {
  int descriptor = -1;
  bool busy = false, abrupt = false;
  Clock::time_point since = Clock::now();  // of the connection, or of the end of its latest request

  // Whether closing the connection drops the bytes that its client has not read; otherwise the system would keep the
  // bytes for minutes.
  void set_abrupt(bool yes) {
    if (yes == std::exchange(abrupt, yes)) return;
    const linger none{.l_onoff = yes, .l_linger = 0};
    ::setsockopt(descriptor, SOL_SOCKET, SO_LINGER, &none, sizeof none);
  }
};

struct Reply {
  int status = 200;
  std::string body, type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
  bool close = false;  // the connection, after the reply
};

// A request and what the server knows about its reply.
struct Exchange {
  Connection* connection = nullptr;
  MHD_Connection* http = nullptr;
  std::atomic<bool> post = false;  // the request has a body; read by the watcher
  enum class Kind { completion, chat, responses, messages, count_tokens, tokenize, detokenize };
  Kind kind = Kind::completion;
  bool of_messages = false;  // errors have Anthropic's form
  std::string client, origin, body;
  size_t received = 0;  // bytes of the body, including bytes that were dropped
  Clock::time_point started = Clock::now();
  int64_t pieces = 0;               // pieces in which the body arrived
  std::optional<Reply> reply;       // to be sent in the next call of libmicrohttpd
  std::shared_ptr<void> announced;  // while the body of a request for an answer is being received
  std::shared_ptr<Delivery> delivery;
  std::shared_ptr<Service::Ticket> ticket;

  // Whether the model generates an answer; the remaining kinds need only its vocabulary.
  bool wants_answer() const { return kind < Kind::count_tokens; }
};

}  // namespace ingot::server
