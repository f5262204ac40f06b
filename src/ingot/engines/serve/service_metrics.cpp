// The metrics of a service, in the form of Prometheus.
#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "ingot/core/check.h"
#include "ingot/engines/serve/service.h"

namespace ingot {

void Histogram::add(double seconds) {
  ++counts_[size_t(std::lower_bound(kBounds.begin(), kBounds.end(), seconds) - kBounds.begin())];
  sum_ += seconds;
}

std::string Histogram::text(const std::string& name, const std::string& help) const {
  std::string out = "# HELP " + name + " " + help + "\n# TYPE " + name + " histogram\n";
  int64_t total = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    total += counts_[i];
    const std::string bound = i < kBounds.size() ? detail::concat(kBounds[i]) : "+Inf";
    out += detail::concat(name, "_bucket{le=\"", bound, "\"} ", total, "\n");
  }
  return out + detail::concat(name, "_sum ", sum_, "\n", name, "_count ", total, "\n");
}

std::string Service::metrics_text() const {
  const ServeCounts c = scheduler_->counts();
  std::string out;
  const auto value = [&](const std::string& name, const char* type, const std::string& help, int64_t n) {
    out += detail::concat("# HELP ingot:", name, " ", help, "\n# TYPE ingot:", name, " ", type, "\ningot:", name, " ",
                          n, "\n");
  };
  value("num_requests_running", "gauge", "Requests that have a slot.", c.running);
  value("num_requests_waiting", "gauge", "Requests that wait for one.", c.waiting);
  value("prompt_tokens_total", "counter", "Tokens of prompts.", c.prompt_tokens);
  value("prefix_cache_hits_total", "counter", "Tokens of prompts that a slot still held.", c.reused_tokens);
  value("generation_tokens_total", "counter", "New tokens.", c.tokens);
  value("spec_decode_num_drafts_total", "counter", "Steps that computed draft tokens.", c.drafts);
  value("spec_decode_num_draft_tokens_total", "counter", "Draft tokens computed.", c.draft_tokens);
  value("spec_decode_num_accepted_tokens_total", "counter", "Draft tokens accepted.", c.accepted_tokens);
  value("request_refused_total", "counter", "Requests refused because too many waited.", c.refused);
  out +=
      "# HELP ingot:request_success_total Requests that ended, by how.\n# TYPE ingot:request_success_total counter\n";
  for (const auto& [reason, n] :
       {std::pair("stop", c.stopped), {"length", c.full}, {"abort", c.cancelled}, {"error", c.failed}})
    out += detail::concat("ingot:request_success_total{finished_reason=\"", reason, "\"} ", n, "\n");
  out +=
      "# HELP ingot:spec_decode_num_accepted_tokens_per_pos_total Draft tokens accepted, by position in the draft.\n"
      "# TYPE ingot:spec_decode_num_accepted_tokens_per_pos_total counter\n";
  for (size_t i = 0; i < c.accepted_at.size(); ++i)
    out += detail::concat("ingot:spec_decode_num_accepted_tokens_per_pos_total{position=\"", i, "\"} ",
                          c.accepted_at[i], "\n");
  const std::lock_guard lock(mutex_);
  return out + queue_.text("ingot:request_queue_time_seconds", "From arrival to a slot.") +
         first_token_.text("ingot:time_to_first_token_seconds", "From arrival to the first token.") +
         between_tokens_.text("ingot:inter_token_latency_seconds", "From one token to the next.") +
         whole_.text("ingot:e2e_request_latency_seconds", "From arrival to the end.");
}

}  // namespace ingot
