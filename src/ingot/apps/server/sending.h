#pragma once
// Sends replies through libmicrohttpd.
#include <microhttpd.h>

#include "ingot/apps/server/exchange.h"
#include "ingot/engines/serve/api_error.h"

namespace ingot::server {

// An error in the form of the request's API.
Reply error_reply(const Exchange& x, const ApiError& e, bool close = false);

MHD_Result send(Exchange& x, const Reply& r);
// For a reply before the request's body could arrive. A reply to a request with a body is sent at once, which closes
// the connection. A reply to a request without a body is sent in the next call of libmicrohttpd, so that the library
// keeps the connection open.
MHD_Result send_soon(Exchange& x, Reply reply);
// Sends the events of the exchange's delivery as they come.
MHD_Result send_stream(Exchange& x);
// Sends the whole answer of the exchange's delivery, or suspends the connection until the answer is complete.
MHD_Result send_when_complete(Exchange& x);

}  // namespace ingot::server
