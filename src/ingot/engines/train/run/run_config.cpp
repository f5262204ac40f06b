#include "ingot/engines/train/run/run_config.h"

#include "ingot/data/packer.h"
#include "ingot/io/json.h"

namespace ingot {
namespace {

template <class Options, class Visit> void visit_train(Options& o, Visit&& visit) {
  visit("steps", o.steps);
  visit("seconds", o.seconds);
  visit("reserve_seconds", o.reserve_seconds);
  visit("seed", o.seed);
  visit("batch_tokens", o.batch_tokens);
  visit("accumulation", o.accumulation);
  visit("order", o.order);
  visit("tokenizer", o.tokenizer);
  visit("split_seed", o.split_seed);
  visit("held_out_every", o.held_out_every);
  visit("held_out_tail", o.held_out_tail);
  visit("products", o.products);
  visit("eval_every", o.eval_every);
  visit("checkpoint_every", o.checkpoint_every);
  visit("log_every", o.log_every);
  visit("keep_checkpoints", o.keep_checkpoints);
  visit("keep_best", o.keep_best);
  visit("init_from", o.init_from);
  visit("max_bad_steps", o.max_bad_steps);
  visit("keep_activations", o.keep_activations);
  visit("cuda_graphs", o.cuda_graphs);
}
template <class Options, class Visit> void visit_schedule(Options& o, Visit&& visit) {
  visit("warmup_steps", o.warmup_steps);
  visit("decay", o.decay);
  visit("warmdown", o.warmdown);
  visit("min_lr", o.min_lr);
  visit("momentum_start", o.momentum_start);
  visit("momentum_end", o.momentum_end);
  visit("momentum_warmup", o.momentum_warmup);
  visit("ema_horizon", o.ema_horizon);
}
template <class Options, class Visit> void visit_optimizer(Options& o, Visit&& visit) {
  visit("matrix_optimizer", o.matrix_optimizer);
  visit("matrix_lr", o.matrix_lr);
  visit("matrix_decay", o.matrix_decay);
  visit("embed_lr", o.embed_lr);
  visit("embed_decay", o.embed_decay);
  visit("head_lr", o.head_lr);
  visit("head_decay", o.head_decay);
  visit("scalar_lr", o.scalar_lr);
  visit("scalar_decay", o.scalar_decay);
  visit("beta1", o.beta1);
  visit("beta2", o.beta2);
  visit("eps", o.eps);
  visit("clip", o.clip);
  visit("muon_nesterov", o.muon_nesterov);
  visit("muon_row_normalise", o.muon_row_normalise);
  visit("muon_iterations", o.muon_iterations);
}

template <class T> void at_least(const char* field, T value, T low) {
  if (!(value >= low)) fail(ErrorCode::usage, "train.", field, ": found ", value, ", expected at least ", low);
}
void in_range(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    fail(ErrorCode::usage, "train.", field, ": found ", value, ", expected ", low, " to ", high);
}

void merge_into(Json& base, const Json& over) {
  if (!base.is_object() || !over.is_object()) {
    base = over;
    return;
  }
  for (const auto& [key, value] : over.items()) merge_into(base[key], value);
}

}  // namespace

void check(const TrainOptions& o) {
  at_least<int64_t>("steps", o.steps, 0);
  at_least("seconds", o.seconds, 0.0);
  at_least("reserve_seconds", o.reserve_seconds, 0.0);
  if (o.seconds > 0 && o.reserve_seconds >= o.seconds)
    fail(ErrorCode::usage, "train.seconds: found ", o.seconds, ", expected more than train.reserve_seconds, ",
         o.reserve_seconds, ", which are kept for the last save");
  in_range("batch_tokens", o.batch_tokens, 1, int64_t(1) << 30);
  in_range("accumulation", o.accumulation, 1, 1 << 20);
  at_least<int64_t>("held_out_every", o.held_out_every, 2);
  if (!(o.held_out_tail > 0 && o.held_out_tail < 1))
    fail(ErrorCode::usage, "train.held_out_tail: found ", o.held_out_tail, ", expected more than 0 and less than 1");
  batch_order(o.order);
  if (o.products != "fp32" && o.products != "bf16")
    fail(ErrorCode::usage, "train.products: found '", o.products, "', expected fp32 or bf16");
  at_least<int64_t>("eval_every", o.eval_every, 0);
  at_least<int64_t>("checkpoint_every", o.checkpoint_every, 0);
  at_least<int64_t>("log_every", o.log_every, 1);
  in_range("keep_checkpoints", o.keep_checkpoints, 1, 1 << 30);
  at_least<int64_t>("max_bad_steps", o.max_bad_steps, 1);
  check(o.schedule);
  check(o.optimizer);
}

std::string to_json(const RunConfig& c) {
  OrderedJson train, schedule, optimizer, all;
  visit_train(c.train, [&](const char* key, const auto& value) { train[key] = value; });
  visit_schedule(c.train.schedule, [&](const char* key, const auto& value) { schedule[key] = value; });
  visit_optimizer(c.train.optimizer, [&](const char* key, const auto& value) { optimizer[key] = value; });
  train["schedule"] = schedule;
  train["optimizer"] = optimizer;
  all["model"] = OrderedJson::parse(to_json(c.model));
  all["train"] = train;
  return write_json(all, 2);
}

RunConfig run_config_from_json(const std::string& text, const std::string& where) {
  const Json json = parse_json(text, where);
  Fields all(json, where, ErrorCode::usage);
  RunConfig c;
  if (const Json* model = all.take("model")) c.model = gpt_config_from_json(model->dump(), where + ": model");
  if (all.has("train")) {
    Fields train = all.object("train");
    visit_train(c.train, [&](const char* key, auto& value) { train.read(key, value); });
    if (train.has("schedule")) {
      Fields schedule = train.object("schedule");
      visit_schedule(c.train.schedule, [&](const char* key, auto& value) { schedule.read(key, value); });
      schedule.finish();
    }
    if (train.has("optimizer")) {
      Fields optimizer = train.object("optimizer");
      visit_optimizer(c.train.optimizer, [&](const char* key, auto& value) { optimizer.read(key, value); });
      optimizer.finish();
    }
    train.finish();
  }
  all.finish();
  check(c.train);
  return c;
}

std::string merge_json(const std::string& base, const std::string& over, const std::string& where) {
  Json merged = parse_json(base, where);
  merge_into(merged, parse_json(over, where));
  return merged.dump();
}

}  // namespace ingot
