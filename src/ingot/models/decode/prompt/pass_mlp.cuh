#pragma once
// The MLPs of a pass: the router and the products of the experts, or of a dense MLP.
#include "ingot/kernels/grouped/grouped.h"
#include "ingot/models/decode/batch/batch_router.cuh"
#include "ingot/models/decode/phased/e4m3_inputs.cuh"
#include "ingot/models/decode/prompt/expert_rows.cuh"
#include "ingot/models/decode/prompt/prompt_pass.cuh"
#include "ingot/models/decode/prompt/prompt_router.cuh"

namespace ingot::decode::prompts {

struct PassMlp : PromptPass {
  // Computes the logits of the router and chooses the experts.
  void choose(const Layer& l, const Choose& by) const {
    const int64_t E = c.experts, tokens = (p.T + kRouted - 1) / kRouted;
    const bool few = p.T <= kMostRouted, here = few && E <= int64_t(kMostChosenHere);
    if (few)
      launch("prompt router", route_kernel, int64_t(l.router.row_tiles) * tokens,
             Route{.x = b.normed,
                   .w = l.router.data,
                   .bias = l.b_router,
                   .logits = b.router,
                   .stride = stride,
                   .row_tile_bytes = l.router.row_tile_bytes,
                   .T = uint32_t(p.T),
                   .E = uint32_t(E),
                   .C = uint32_t(c.hidden),
                   .weight_tiles = l.router.weight_tiles,
                   .arrived = here ? b.arrived : nullptr,
                   .choose = by},
             kRouteThreads);
    else
      product(l.router, l.b_router, normed(p.T), matrix(b.router, DType::f32, p.T, E, E));
    if (!here) launch("prompt choice", choose_kernel, (p.T + kWarps - 1) / kWarps, by);
  }
  Places places_of(const uint32_t* chosen) const {
    return {.chosen = chosen,
            .place = b.place,
            .offsets = b.offsets,
            .S = uint32_t(S),
            .E = uint32_t(c.experts),
            .count = parts.empty() ? &p.sequences->input->count : nullptr,
            .k = uint32_t(c.experts_per_token)};
  }
  void route(const Layer& l, uint32_t* chosen) const {
    choose(l, {b.router, chosen, b.weights, uint32_t(p.T), uint32_t(c.experts), uint32_t(c.experts_per_token)});
    place_and_gather(places_of(chosen));
  }
  // Does the work of PassNorms::norm_after_output() and route() if routes_by_cluster is true.
  void norm_and_route(const Layer& l, uint32_t* chosen) const {
    const uint32_t E = uint32_t(c.experts), k = uint32_t(c.experts_per_token), T = uint32_t(p.T);
    const bool one_cluster = T <= kRouted;
    const RouteRows rows{.norm = norm_of(l.mlp_norm),
                         .halves = output_in_halves ? b.down : nullptr,
                         .route = {.x = nullptr,
                                   .w = l.router.data,
                                   .bias = l.b_router,
                                   .logits = nullptr,
                                   .stride = stride,
                                   .row_tile_bytes = l.router.row_tile_bytes,
                                   .T = T,
                                   .E = E,
                                   .C = uint32_t(c.hidden),
                                   .weight_tiles = l.router.weight_tiles,
                                   .choose = {nullptr, chosen, b.weights, T, E, k}},
                         .places = places_of(chosen),
                         .gathered = one_cluster ? b.gathered : nullptr};
    gpu::launch("batch norm and router", route_rows_kernel,
                {.grid = (p.T + kRouted - 1) / kRouted * kRouteCluster,
                 .block = kRouteRowsThreads,
                 .cluster = kRouteCluster,
                 .overlap = true,
                 .device = p.device},
                stream, rows);
    if (!one_cluster) place_and_gather(places_of(chosen));
  }
  void place_and_gather(const Places& places) const {
    const Gather gather{b.normed, b.gathered, b.place, stride, places.k};
    if (S <= int64_t(kFewChoices))
      return launch("prompt places and rows", place_and_gather_kernel, p.T, PlaceAndGather{places, gather});
    launch("prompt places", places_kernel, places.E, places);
    launch("prompt rows", gather_kernel, p.T, gather);
  }
  // Rounds the inputs of the experts in place, where the model rounds them.
  void round_inputs(bf16* rows, int64_t row_stride, int64_t numbers) const {
    if (!c.e4m3_inputs) return;
    gpu::launch("prompt rounded inputs", round_rows_kernel<false>,
                rounding_launch(uint32_t(S), uint32_t(numbers), p.device), stream,
                RoundedRows{reinterpret_cast<char*>(rows), 2 * row_stride, uint32_t(S), uint32_t(numbers)});
  }
  void gate_rows(const Layer& l, int64_t rows) const {
    launch("prompt gate", gate_rows_kernel, rows,
           GateRows{b.gate_up, b.hidden, weight_tile_padded_cols(l.down.cols), l.down.cols, gate_of(c)});
  }
  void dense_mlp(const Layer& l) const {
    const int64_t channels = l.down.cols;
    product(l.gate_up, l.b_gate_up, normed(p.T), matrix(b.gate_up, DType::f32, p.T, 2 * channels, 2 * channels));
    gate_rows(l, p.T);
    product_into_residual(l.down, l.b_down,
                          matrix(b.hidden, DType::bf16, p.T, channels, weight_tile_padded_cols(channels)), 1);
  }
  void experts(const Layer& l) const {
    const int64_t channels = l.down.cols;
    const bool fused = is_clamped_gate(c);  // the product applies the gate
    round_inputs(b.gathered, stride, c.hidden);
    const Tensor h = matrix(b.hidden, DType::bf16, S, channels, weight_tile_padded_cols(channels));
    grouped_linear({.x = matrix(b.gathered, DType::bf16, S, c.hidden, stride),
                    .w = l.gate_up.data,
                    .format = l.gate_up.format,
                    .groups = c.experts,
                    .n = l.gate_up.rows,
                    .bias = l.b_gate_up,
                    .offsets = b.offsets,
                    .y = fused ? h : matrix(b.gate_up, DType::f32, S, 2 * channels, 2 * channels),
                    .limit = float(c.gate.limit),
                    .alpha = float(c.gate.alpha),
                    .claims = b.claims},
                   stream);
    if (!fused) gate_rows(l, S);
    round_inputs(b.hidden, weight_tile_padded_cols(channels), channels);
    grouped_linear({.x = h,
                    .w = l.down.data,
                    .format = l.down.format,
                    .groups = c.experts,
                    .n = l.down.rows,
                    .bias = l.b_down,
                    .offsets = b.offsets,
                    .y = matrix(b.down, DType::f32, S, c.hidden, c.hidden),
                    .claims = b.claims},
                   stream);
  }
};

}  // namespace ingot::decode::prompts
