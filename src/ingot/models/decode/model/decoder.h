#pragma once
// A decoder-only transformer on GPUs as generation sees it.
#include <string>

#include "ingot/models/decoder.h"
#include "ingot/models/decoder_weights.h"
#include "ingot/models/options.h"
#include "ingot/models/spec.h"

namespace ingot {

// What keeps a model from running on the GPUs that the options name, in a line; empty where nothing does: too few GPUs,
// others than Hopper, no peer access between two of them, sizes the kernels do not take or that cannot be shared.
std::string gpus_unsupported_reason(const DecoderSpec& spec, const DecoderOptions& options);
// The same, and too little memory free on one of them (with both figures).
std::string gpu_unsupported_reason(const DecoderSpec& spec, const DecoderWeights& weights,
                                   const DecoderOptions& options);
// What of them a GPU will not hold as it is stored, in a line: matrices in f32; empty where there are none.
std::string gpu_rounding(const DecoderWeights& weights);
// The kernels that this GPU does not run and what is used in their place, in a line; empty on a Hopper.
std::string gpu_missing_paths();
// The weights are copied and may be gone afterwards. Slots take turns; with options.batched_sequences, three or more
// that are asked for a token together get it by one pass over the weights, up to columns() of them: the numbers of a
// launch a phase, which differ by roundings from those of the kernel that a slot alone gets. Cut back further than the
// sliding layers' rings reach, a slot forgets everything. Error{unsupported} with gpu_unsupported_reason().
std::unique_ptr<Decoder> make_gpu_decoder(const DecoderSpec& spec, const DecoderWeights& weights,
                                          const DecoderOptions& options);
// The same with random weights of these shapes, made on the GPUs from the seed.
std::unique_ptr<Decoder> make_synthetic_gpu_decoder(const DecoderSpec& spec, const DecoderWeights& shapes,
                                                    const DecoderOptions& options, uint64_t seed);

}  // namespace ingot
