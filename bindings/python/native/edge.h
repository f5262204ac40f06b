#pragma once
// All parameters of a module as a single input for autograd: a tensor with the concatenation of the parameters'
// gradients as its gradient. The cost of a recorded call grows with the number of tensors, because PyTorch makes and
// drops a node for every parameter in every call; with an edge PyTorch makes these nodes once.
#include <nanobind/nanobind.h>

#include <vector>

#include "ingot/kernels/mlp/mlp.h"

namespace ingot::python {

namespace nb = nanobind;

// An edge belongs to a module and stands in the module's __dict__. A pickled or deep-copied edge is empty;
// copy.copy(module) shares the edge like the parameters. The graph behind an edge keeps the parameters alive.
class Edge {
 public:
  Edge();
  ~Edge();
  Edge(const Edge&) = delete;
  Edge& operator=(const Edge&) = delete;

  // The tensor for these parameters, described by `layers`, on this stream: valid from the second call in a row with
  // the same parameters, if all of them are leaves that require a gradient. Otherwise the result is not valid and an
  // earlier tensor is released: while a parameter's node is alive, autograd uses this node even if the parameter has a
  // different shape by then.
  nb::object of(const std::vector<nb::object>& parameters, const std::vector<MlpLayer>& layers, Stream stream);
  void forget();

 private:
  // A graph remembers its tensors' shapes, types and streams. An object may receive a different tensor or different
  // memory.
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

// Sets the Python function for making the tensor from the parameters.
void attach_edges(nb::handle make);
// For gc.callbacks: before a collection of the oldest generation, edges release their tensors, because these hide
// reference cycles from the collector.
void forget_edges(nb::handle phase, nb::dict info);

}  // namespace ingot::python
