#include "ingot/text/grammar/formats.h"

#include <map>

#include "ingot/text/grammar/pattern.h"

namespace ingot {
namespace {

std::string anchored(const std::string& pattern) { return "^(?:" + pattern + ")$"; }

std::map<std::string, std::string> make_patterns() {
  const std::string year = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)";
  const std::string leap_year = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)";
  const std::string month_and_day =
      "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
      "02-(?:0[1-9]|1[0-9]|2[0-8]))";
  const std::string date = "(?:" + year + "-" + month_and_day + "|" + leap_year + "-02-29)";
  const std::string hour_and_minute = "(?:[01][0-9]|2[0-3]):[0-5][0-9]";
  const std::string time = hour_and_minute + ":[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-]" + hour_and_minute + ")";
  const std::string hex = "[0-9a-fA-F]", byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
  const std::string word = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+";
  const std::string label = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?";
  const std::string character = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%" + hex + "{2})";  // RFC 3986's pchar
  const std::string rest = "(?:\\?(?:" + character + "|[/?])*)?(?:#(?:" + character + "|[/?])*)?";
  const std::string segments = "(?:/" + character + "*)*";
  const std::string host = label + "(?:\\." + label + ")*(?::[0-9]{1,5})?";
  return {
      {"date", anchored(date)},
      {"time", anchored(time)},
      {"date-time", anchored(date + "T" + time)},
      {"uuid", anchored(hex + "{8}-" + hex + "{4}-" + hex + "{4}-" + hex + "{4}-" + hex + "{12}")},
      {"email", anchored(word + "(?:\\." + word + ")*@(?:" + label + "\\.)+[A-Za-z]{2,63}")},
      {"ipv4", anchored(byte + "(?:\\." + byte + "){3}")},
      {"uri",
       anchored("[A-Za-z][A-Za-z0-9+.-]*:(?://" + host + segments + "|/?" + character + "+" + segments + ")" + rest)},
  };
}

}  // namespace

const Dfa* dfa_of_format(const std::string& format) {
  static const std::map<std::string, Dfa> automata = [] {  // built once, because a schema may use many formats
    std::map<std::string, Dfa> all;
    for (const auto& [name, pattern] : make_patterns()) {
      AutomatonBudget budget;
      all.emplace(name, dfa_of_pattern(pattern, budget));
    }
    return all;
  }();
  const auto at = automata.find(format);
  return at == automata.end() ? nullptr : &at->second;
}

}  // namespace ingot
