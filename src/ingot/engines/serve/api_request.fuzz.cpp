// A body is refused with a client error that names a field, or it is parsed within the limits and rendered.
#include "ingot/engines/serve/api_request.h"

#include <algorithm>

#include "ingot/testing/fuzz.h"
#include "ingot/text/chat/harmony_format.h"

namespace {

void require_limits(const ingot::ApiRequest& r, const ingot::ApiLimits& limits) {
  FUZZ_REQUIRE(r.n >= 1 && r.n <= limits.choices && int64_t(r.prompts.size()) * r.n <= limits.choices);
  FUZZ_REQUIRE(r.tokens == -1 || r.tokens >= (r.echo ? 0 : 1));
  FUZZ_REQUIRE(r.logprobs >= -1 && r.logprobs <= limits.logprobs);
  FUZZ_REQUIRE(int64_t(r.stop.size()) <= limits.stops && int64_t(r.bias.size()) <= limits.bias);
  for (const std::string& s : r.stop) FUZZ_REQUIRE(!s.empty() && int64_t(s.size()) <= limits.stop_bytes);
  FUZZ_REQUIRE(r.sampling.temperature >= 0 && r.sampling.temperature <= 2);
  FUZZ_REQUIRE(r.sampling.top_p > 0 && r.sampling.top_p <= 1);
}

// The prompt begins with a system message. The prompt omits instructions without text, and contains every message of a
// user.
void require_rendered(const ingot::ApiRequest& r) {
  const auto is_users = [](const ingot::ApiMessage& m) { return m.role == "user"; };
  const int64_t users = std::ranges::count_if(r.messages, is_users);
  FUZZ_REQUIRE(int64_t(ingot::harmony_messages(ingot::conversation_of(r)).size()) >= 1 + users);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  for (const int kind : {0, 1, 2}) try {
      const ingot::ApiRequest r =
          kind == 2 ? ingot::parse_responses_request(body) : ingot::parse_api_request(body, kind == 1);
      require_limits(r, {});
      FUZZ_REQUIRE(kind > 0 ? !r.messages.empty() : !r.prompts.empty());
      if (kind > 0) require_rendered(r);
    } catch (const ingot::ApiError& e) {
      FUZZ_REQUIRE(e.status == 400 && !e.param.empty());
      FUZZ_REQUIRE(ingot::to_json(e).starts_with(R"({"error":{"message":")"));
    }
  return 0;
}
