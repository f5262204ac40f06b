#pragma once
// All parameters of a module as one input of autograd's: a tensor whose gradient is theirs, one after the other. What a
// call costs where it records for backward grows with the tensors it is recorded for, and PyTorch makes and drops a
// node for every parameter each time; with an edge it does so once.
#include <nanobind/nanobind.h>

#include <vector>

#include "ingot/kernels/mlp/mlp.h"

namespace ingot::python {

namespace nb = nanobind;

// Of one module, in its __dict__. Pickles and deep copies of it are empty; copy.copy(module) shares it, as it shares
// the parameters. An edge keeps what the graph behind it keeps: those parameters.
class Edge {
 public:
  Edge();
  ~Edge();
  Edge(const Edge&) = delete;
  Edge& operator=(const Edge&) = delete;

  // The tensor for these parameters, which `layers` describes, on this stream: from the second call in a row that asks
  // for the same, of which all are leaves that want a gradient. Not valid otherwise, and what there was is let go of:
  // a parameter's node serves whoever uses it as long as it is there, even when the parameter has another shape by
  // then.
  nb::object of(const std::vector<nb::object>& parameters, const std::vector<MlpLayer>& layers, Stream stream);
  void forget();

 private:
  // A graph remembers its tensors' shapes, types and streams. An object may be given another tensor or other memory.
  struct Part {
    const void *implementation, *data;
    DType dtype;
    Device device;
    Shape shape;
    bool operator==(const Part&) const = default;
  };
  std::vector<Part> parts_;
  Stream stream_;
  nb::object tensor_;
};

// What makes the tensor, called with the parameters.
void attach_edges(nb::handle make);
// For gc.callbacks: before the oldest objects are collected too, edges let go of what hides cycles from it.
void forget_edges(nb::handle phase, nb::dict info);

}  // namespace ingot::python
