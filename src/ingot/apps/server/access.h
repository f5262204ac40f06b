#pragma once
// Which clients may send requests: by the host and the origin that a request names, and by its API key.
#include <microhttpd.h>

#include <string>
#include <vector>

#include "ingot/apps/server/exchange.h"
#include "ingot/apps/server/server.h"

namespace ingot::server {

class Access {
 public:
  explicit Access(const ServerOptions& options);

  // Throws ApiError 403 for a host that the options do not name.
  void check_host(MHD_Connection* c) const;
  // Pages of another origin may send requests if the origin is allowed; otherwise throws ApiError 403. Returns the
  // origin to name in the reply, or "".
  std::string check_origin(MHD_Connection* c) const;
  // Throws ApiError 401 without a known key. Returns a name for the client: the hash of its key, or "" if requests need
  // no key.
  std::string check_key(MHD_Connection* c) const;

 private:
  std::vector<std::string> hosts_, origins_, key_hashes_;
};

// The reply to a browser that asks whether a page of an allowed origin may send a request.
Reply preflight(MHD_Connection* c);

}  // namespace ingot::server
