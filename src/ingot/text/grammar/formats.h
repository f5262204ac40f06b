#pragma once
// The strings that a schema's `format` allows.
#include <string>

#include "ingot/text/grammar/dfa.h"

namespace ingot {

// date, time, date-time (RFC 3339, with a zone, days that exist, no leap second), uuid, email (dotted names, a domain
// with a top level of letters), ipv4 and uri (a scheme, then //host, or a path; no user, no IPv6). nullptr: any other
// format, which is an annotation.
const Dfa* dfa_of_format(const std::string& format);

}  // namespace ingot
