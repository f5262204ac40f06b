#include "ingot/apps/server/sending.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "ingot/apps/server/request_header.h"
#include "ingot/engines/serve/messages.h"

namespace ingot::server {
namespace {

MHD_Result queue(Exchange& x, MHD_Response* response, const Reply& r) {
  if (response == nullptr) return MHD_NO;
  MHD_add_response_header(response, "Content-Type", r.type.c_str());
  MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
  for (const auto& [name, value] : r.headers) MHD_add_response_header(response, name.c_str(), value.c_str());
  if (!x.origin.empty()) {
    MHD_add_response_header(response, "Access-Control-Allow-Origin", x.origin.c_str());
    MHD_add_response_header(response, "Vary", "Origin");
  }
  if (r.status == 401) MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
  if (r.status == 429 || r.status == 503) MHD_add_response_header(response, "Retry-After", "1");
  if (r.close) MHD_add_response_header(response, "Connection", "close");
  const MHD_Result result = MHD_queue_response(x.http, unsigned(r.status), response);
  MHD_destroy_response(response);
  return result;
}

// The library's callback that reads the next bytes of a stream.
ssize_t read_stream(void* of, uint64_t, char* into, size_t most) {
  Delivery& d = **static_cast<std::shared_ptr<Delivery>*>(of);
  const std::lock_guard lock(d.mutex);
  if (d.waiting.empty() && d.ended) return MHD_CONTENT_READER_END_OF_STREAM;
  if (d.waiting.empty()) {
    d.sleep();
    return 0;
  }
  const size_t n = std::min(most, d.waiting.size());
  std::memcpy(into, d.waiting.data(), n);
  d.took(n);
  return ssize_t(n);
}

}  // namespace

Reply error_reply(const Exchange& x, const ApiError& e, bool close) {
  return {.status = e.status, .body = (x.of_messages ? to_messages_json(e) : to_json(e)) + "\n", .close = close};
}

MHD_Result send(Exchange& x, const Reply& r) {
  MHD_Response* response =
      MHD_create_response_from_buffer(r.body.size(), const_cast<char*>(r.body.data()), MHD_RESPMEM_MUST_COPY);
  return queue(x, response, r);
}
MHD_Result send_soon(Exchange& x, Reply reply) {
  if (header(x.http, "Content-Length") != nullptr || header(x.http, "Transfer-Encoding") != nullptr)
    return send(x, reply);
  x.reply = std::move(reply);
  return MHD_YES;
}
MHD_Result send_stream(Exchange& x) {
  MHD_Response* response = MHD_create_response_from_callback(
      MHD_SIZE_UNKNOWN, 16384, &read_stream, new std::shared_ptr<Delivery>(x.delivery),
      [](void* of) { delete static_cast<std::shared_ptr<Delivery>*>(of); });
  return queue(x, response,
               {.type = "text/event-stream", .headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}}});
}
MHD_Result send_when_complete(Exchange& x) {
  Delivery& d = *x.delivery;
  const std::lock_guard lock(d.mutex);
  if (!d.ended) {
    d.sleep();
    return MHD_YES;
  }
  return send(x, {.status = d.status, .body = std::exchange(d.waiting, {}) + "\n"});
}

}  // namespace ingot::server
