#pragma once
// The way of an answer from the scheduler's thread to a connection.
#include <microhttpd.h>

#include <mutex>
#include <string>

#include "ingot/core/clock.h"
#include "ingot/engines/serve/api_error.h"

namespace ingot::server {

// The connection is suspended while there is nothing to send. A client that reads more slowly than tokens come gets no
// more tokens until half of the waiting bytes have been read.
struct Delivery {
  std::mutex mutex;
  MHD_Connection* connection = nullptr;  // null once the request has ended
  bool streams = false, asleep = false, ended = false;
  bool of_messages = false;  // errors have Anthropic's form
  int status = 200;
  std::string waiting;       // bytes to send
  double stall_seconds = 0;  // ServerOptions
  Clock::time_point latest = Clock::now();
  bool behind = false;  // the client must catch up within `patience` seconds from behind_since on
  Clock::time_point behind_since;
  double patience = 0;

  // Called on the scheduler's thread.
  void push(const std::string& bytes);
  bool ready();
  // Only the first call has an effect.
  void end(int code, const std::string& body);
  // Ends an answer that the scheduler does not end in time.
  void cut_off(const ApiError& e);

  // Called under the mutex.
  void wake();
  void sleep();
  void took(size_t n);  // bytes at the front of `waiting` have been sent

 private:
  void fall_behind(double seconds);
};

}  // namespace ingot::server
