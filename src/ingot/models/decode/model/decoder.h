#pragma once
// The Decoder of a decoder-only transformer on GPUs.
#include <string>

#include "ingot/models/decoder.h"
#include "ingot/models/decoder_weights.h"
#include "ingot/models/draft/head/head_weights.h"
#include "ingot/models/options.h"
#include "ingot/models/spec.h"

namespace ingot {

// Returns in one line why the model cannot run on the GPUs that the options name: too few GPUs, GPUs without the
// required features, no peer access between two GPUs, or sizes that the kernels do not support or that cannot be
// shared. Empty if the model can run.
std::string gpus_unsupported_reason(const DecoderSpec& spec, const DecoderOptions& options);
// The same, and also the reason if the GPUs cannot compute the draft head, or if a GPU has too little free memory (with
// the required and the free bytes). Throws Error{usage} for a wrong INGOT_MEGAKERNEL, so that the value is refused
// before weights are read.
std::string gpu_unsupported_reason(const DecoderSpec& spec, const DecoderWeights& weights,
                                   const DecoderOptions& options, const draft::DraftHead* head = nullptr);
// Returns in one line which weights a GPU holds in another format than the file, namely matrices in f32; empty if there
// are none.
std::string gpu_rounding(const DecoderWeights& weights);
// Returns in one line which kernels this GPU does not run for the model and which kernels replace them; empty if there
// are none. Throws Error{usage} for a wrong INGOT_MEGAKERNEL.
std::string gpu_missing_paths(const DecoderSpec& spec);
// The weights and the head are copied; the caller may free them afterwards. Slots are computed one after another. With
// options.batched_sequences, up to columns() slots that need a token at the same time get their tokens in one pass over
// the weights. Such a pass has at least two slots if the row kernel supports the model, otherwise at least three. The
// logits of such a pass differ by roundings from the logits of a single slot. A slot that is rewound further than the
// circular caches of the sliding layers reach becomes empty. With a draft head, every phase of a layer is a separate
// launch. Throws Error{unsupported} with gpu_unsupported_reason().
std::unique_ptr<Decoder> make_gpu_decoder(const DecoderSpec& spec, const DecoderWeights& weights,
                                          const DecoderOptions& options, const draft::DraftHead* head = nullptr);
// The same with random weights of these shapes, made on the GPUs from `seed`.
std::unique_ptr<Decoder> make_synthetic_gpu_decoder(const DecoderSpec& spec, const DecoderWeights& shapes,
                                                    const DecoderOptions& options, uint64_t seed,
                                                    const draft::DraftHead* head = nullptr);

}  // namespace ingot
