#pragma once
// The chat page of the server.
#include "ingot/apps/server/exchange.h"

namespace ingot::server {

Reply page_reply();

}  // namespace ingot::server
