// A CUDA device that is the CPU: tensors of device type "cuda" whose bytes lie in host memory, computed by torch's CPU kernels.
//
// What it has of a real card: memory of a fixed size with the allocator's statistics and its out-of-memory error; a random
// generator of its own; pinned memory; CUDA graphs that repeat what was recorded, without running it then, on the same
// addresses; and the refusal to compute with tensors of two devices. What it has not: its speed, its rounding, its kernels, anything asynchronous.
//
// Everything that torch dispatches to CUDA and that has no kernel there arrives at `run`, which lends the CPU kernel the same
// bytes as CPU tensors and copies what it returns into memory of the card.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

using c10::DeviceType;
using c10::IValue;
using torch::jit::Stack;

static constexpr auto CUDA = DeviceType::CUDA;
static constexpr int64_t BLOCK = 512;            // the allocator's smallest unit
static constexpr int64_t SEGMENT = 2ll << 20;    // what it asks of the card at a time

static thread_local c10::DeviceIndex current_card = 0;
static int device_count = 1;
static int64_t total_bytes = 1ll << 30;
static int sync_debug_mode = 0;  // as torch.cuda.set_sync_debug_mode has it

// ---------------------------------------------------------------------------------------------------------------- memory

struct Card {
  int64_t allocated = 0, peak_allocated = 0;   // bytes of live blocks
  int64_t reserved = 0, peak_reserved = 0;     // blocks, what is cached, and what graphs hold
  int64_t graph_bytes = 0;                     // held by graphs: reserved, not allocated
  int64_t taken = 0;                           // by other programs
  int64_t count = 0, retries = 0, ooms = 0;
  double fraction = 1.0;
};

struct Block { int64_t bytes; c10::DeviceIndex device; bool of_graph; int64_t number; };
struct Before { int64_t number; std::string bytes; };

static std::mutex lock;
static std::map<c10::DeviceIndex, Card> cards;
static std::unordered_map<void*, Block> blocks;
static bool recording = false, recording_failed = false;
static int64_t last_number = 0;
static std::unordered_map<void*, Before> before_recording;  // what the blocks of then held

static int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }
static std::string gib(int64_t bytes) {
  char text[32];
  const bool large = bytes >= (1ll << 30);
  snprintf(text, sizeof text, "%.2f %s", double(bytes) / (large ? 1ll << 30 : 1ll << 20), large ? "GiB" : "MiB");
  return text;
}

static void release(void* pointer) {
  if (pointer == nullptr) return;
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks.find(pointer);
  if (found != blocks.end()) {
    auto& card = cards[found->second.device];
    if (found->second.of_graph) {
      card.graph_bytes -= found->second.bytes;
      card.reserved -= found->second.bytes;
    } else {
      card.allocated -= found->second.bytes;
    }
    card.count--;
    blocks.erase(found);
  }
  std::free(pointer);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(CUDA, current_card);
    if (size == 0) return {nullptr, nullptr, &release, device};
    const auto bytes = round_up(size, BLOCK);
    std::lock_guard<std::mutex> guard(lock);
    auto& card = cards[device.index()];
    const auto room = std::min<int64_t>(int64_t(card.fraction * total_bytes), total_bytes - card.taken);
    const auto needed = round_up(card.allocated + card.graph_bytes + bytes, SEGMENT);
    if (card.reserved > room && needed <= room) card.retries++;  // cached memory is given back first
    if (needed > room) {
      card.ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", gib(size), ". GPU ", int(device.index()),
          " has a total capacity of ", gib(total_bytes), " of which ", gib(std::max<int64_t>(0, total_bytes - card.taken - card.reserved)),
          " is free. Including non-PyTorch memory, this process has ", gib(card.reserved), " memory in use. Of the allocated memory ",
          gib(card.allocated), " is allocated by PyTorch, and ", gib(std::max<int64_t>(0, card.reserved - card.allocated)),
          " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
          "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.");
    }
    void* pointer = std::aligned_alloc(BLOCK, bytes);
    TORCH_CHECK(pointer != nullptr, "the host has no memory left for the emulated card");
    blocks[pointer] = {bytes, device.index(), false, ++last_number};
    card.count++;
    card.allocated += bytes;
    card.reserved = std::min(room, std::max(card.reserved, needed));
    card.peak_allocated = std::max(card.peak_allocated, card.allocated);
    card.peak_reserved = std::max(card.peak_reserved, card.reserved);
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> guard(lock);
    for (auto& [_, card] : cards) card.reserved = round_up(card.allocated + card.graph_bytes, SEGMENT);
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    const auto& card = cards[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& all = stats.allocated_bytes[0];
    all.current = card.allocated, all.peak = card.peak_allocated;
    stats.active_bytes[0] = stats.requested_bytes[0] = all;
    stats.reserved_bytes[0].current = card.reserved, stats.reserved_bytes[0].peak = card.peak_reserved;
    stats.allocation[0].current = card.count;
    stats.num_alloc_retries = card.retries, stats.num_ooms = card.ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    auto& card = cards[device];
    card.peak_allocated = card.allocated, card.peak_reserved = card.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    const auto& card = cards[device];
    return {size_t(std::max<int64_t>(0, total_bytes - card.taken - card.reserved)), size_t(total_bytes)};
  }
};

static Memory memory;

struct PinnedMemory final : c10::Allocator {
  static std::set<const void*>& pinned() { static std::set<const void*> all; return all; }
  static void unpin(void* pointer) {
    std::lock_guard<std::mutex> guard(lock);
    pinned().erase(pointer);
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t size) override {
    void* pointer = std::aligned_alloc(BLOCK, round_up(std::max<int64_t>(1, size), BLOCK));
    std::lock_guard<std::mutex> guard(lock);
    pinned().insert(pointer);
    return {pointer, pointer, &unpin, c10::Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

static PinnedMemory pinned_memory;

// ------------------------------------------------------------------------------------------------------ what torch asks for

static at::Generator& generator() {
  static at::Generator own = at::detail::createCPUGenerator(0);
  return own;
}

struct Hooks final : public at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return device_count; }
  int getNumGPUs() const override { return device_count; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_card = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_card; }
  c10::DeviceIndex current_device() const override { return current_card; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_card, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_card, device); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(lock);
    return PinnedMemory::pinned().count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(CUDA, 0); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const override { return generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, c10::Device(CUDA, std::max<int>(0, device.index()))); }
  DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return c10::Device(CUDA, std::exchange(current_card, device.index())); }
  c10::Device getDevice() const override { return c10::Device(CUDA, current_card); }
  void setDevice(c10::Device device) const override { current_card = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { if (device.index() >= 0) current_card = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream one) const override { return stream(one.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

static Hooks hooks;
static Guard guard;

// ---------------------------------------------------------------------------------------------------------------- kernels

// The same bytes as a CPU tensor. Its storage may be resized: `run` sees that the address has changed.
static at::Tensor lend(const at::Tensor& tensor) {
  auto& storage = tensor.storage();
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), c10::Device(DeviceType::CPU)), c10::GetAllocator(DeviceType::CPU), true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

static at::Tensor to_card(const at::Tensor& from) {
  auto result = at::detail::empty_strided_generic(from.sizes(), from.strides(), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), from.scalar_type());
  if (from.numel()) std::memcpy(result.mutable_data_ptr(), from.const_data_ptr(), result.storage().nbytes());
  return result;
}

struct Recorded { c10::OperatorHandle op; Stack arguments; std::vector<at::Tensor> kept; std::vector<at::Tensor> results; };
static std::vector<Recorded>* graph = nullptr;

// What takes a CPU tensor beside tensors of the card on a real one, too.
static const std::set<std::string> mixes = {"aten::copy_", "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_index_put_impl_.", "aten::index_put", "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::_copy_from"};
// What makes the host wait for the card.
static const std::set<std::string> waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_consecutive", "aten::equal", "aten::repeat_interleave.Tensor"};

// Runs the CPU's kernel. Matrix products of 16 bits are computed in float32, as a card does: the CPU's own are up to a hundred times slower.
static void compute(const c10::OperatorHandle& op, Stack* stack) {
  static const std::set<std::string> products = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
  if (op.schema().name() == "aten::mm" && op.schema().overload_name() == "dtype") {  // a card's alone: `torch.mm(…, out_dtype=)`
    auto product = (*stack)[0].toTensor().to(at::kFloat).mm((*stack)[1].toTensor().to(at::kFloat)).to((*stack)[2].toScalarType());
    stack->clear();
    stack->emplace_back(product);
    return;
  }
  const auto& last = stack->back();
  const bool narrow = last.isTensor() && at::isReducedFloatingType(last.toTensor().scalar_type());
  if (!narrow || op.schema().overload_name() != "out" || !products.count(op.schema().name()))
    return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto result = last.toTensor();
  for (auto& one : *stack) if (one.isTensor()) one = one.toTensor().to(at::kFloat);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  result.copy_(stack->back().toTensor());
  stack->back() = result;
}

static void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const auto first = stack->size() - schema.arguments().size();
  Stack given(stack->begin() + first, stack->end());
  std::vector<std::pair<at::Tensor, at::Tensor>> lent;  // of the card, of the CPU
  c10::DeviceIndex device = -1;

  auto convert = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(tensor.dim() == 0 || mixes.count(name), "Expected all tensors to be on the same device, but found at least two devices, "
          "cuda:", std::max<int>(0, device), " and ", tensor.device(), "! (", name, ")");
      return tensor;
    }
    TORCH_CHECK(device < 0 || device == tensor.device().index() || tensor.dim() == 0 || name == "aten::copy_",
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(device), " and ", tensor.device(), "! (", name, ")");
    if (device < 0) device = tensor.device().index();
    lent.emplace_back(tensor, lend(tensor));
    return lent.back().second;
  };

  // Tensors of the card first, so that a CPU tensor before them is recognised.
  for (const auto& one : given) if (one.isTensor() && one.toTensor().defined() && one.toTensor().is_cuda()) { device = one.toTensor().device().index(); break; }
  Stack arguments;
  for (size_t i = 0; i < given.size(); i++) {
    const auto& one = given[i];
    if (one.isTensor()) arguments.emplace_back(convert(one.toTensor()));
    else if (one.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : one.toTensorVector()) list.push_back(convert(tensor));
      arguments.emplace_back(list);
    } else if (one.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : one.toOptionalTensorVector()) list.push_back(tensor ? std::optional(convert(*tensor)) : std::nullopt);
      arguments.emplace_back(list);
    } else if (one.isDevice() && one.toDevice().is_cuda()) {
      device = std::max<c10::DeviceIndex>(0, one.toDevice().index());
      arguments.emplace_back(c10::Device(DeviceType::CPU));
    } else if (one.isNone() && schema.arguments()[i].name() == "generator") arguments.emplace_back(generator());
    else arguments.push_back(one);
  }
  if (waits.count(name) || (name == "aten::copy_" && !given[2].toBool() && given[0].toTensor().is_cuda() != given[1].toTensor().is_cuda())) {
    recording_failed |= recording;
    TORCH_CHECK(!recording, "CUDA error: operation not permitted when stream is capturing (", name, ")");
    TORCH_CHECK(sync_debug_mode < 2, "called a synchronizing CUDA operation (", name, ")");
    if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", name, ")");
  }

  // Where the CPU's kernel lacks a form that CUDA has: softmax from half to float in one step.
  auto half_to_float = [&](const char* plain) { return schema.name() == std::string("aten::") + plain && arguments[2].isBool() && arguments[2].toBool(); };
  if (half_to_float("_softmax") || half_to_float("_log_softmax")) {
    arguments[0] = arguments[0].toTensor().to(at::kFloat);
    arguments[2] = false;
  }
  std::optional<at::ScalarType> narrow;
  if (schema.name() == "aten::_softmax_backward_data" || schema.name() == "aten::_log_softmax_backward_data") {
    const auto wanted = arguments[3].toScalarType();
    if (wanted != arguments[0].toTensor().scalar_type()) narrow = wanted, arguments[3] = arguments[0].toTensor().scalar_type();
  }

  Stack work = arguments;
  compute(op, &work);

  for (auto& [of_card, of_cpu] : lent) {  // a kernel has resized what it writes to
    if (of_cpu.storage().data() != of_card.storage().data()) of_card.set_(to_card(of_cpu.contiguous()));
    else if (of_cpu.sizes() != of_card.sizes()) of_card.unsafeGetTensorImpl()->set_sizes_and_strides(of_cpu.sizes(), of_cpu.strides());
  }

  const auto before = current_card;
  if (device >= 0) current_card = device;
  std::vector<at::Tensor> results;
  auto give_back = [&](const at::Tensor& result) -> at::Tensor {
    if (!result.defined()) return result;
    for (const auto& one : given) if (one.isTensor() && result.is_same(one.toTensor())) return result;  // a CPU tensor, written in place
    for (auto& [of_card, of_cpu] : lent) {
      if (result.is_same(of_cpu)) return of_card;
      if (result.numel() && result.storage().data() == of_cpu.storage().data() && of_cpu.storage().data() != nullptr)
        return at::native::as_strided_tensorimpl(of_card, result.sizes(), result.strides(), result.storage_offset());
    }
    auto own = to_card(narrow ? result.to(*narrow) : result);
    results.push_back(own);
    return own;
  };
  try {
    for (auto& one : work) {
      if (one.isTensor()) one = give_back(one.toTensor());
      else if (one.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : one.toTensorVector()) list.push_back(give_back(tensor));
        one = list;
      }
    }
  } catch (...) {
    current_card = before;
    throw;
  }
  current_card = before;
  if (recording && graph != nullptr) {
    std::vector<at::Tensor> kept;
    for (auto& [of_card, _] : lent) kept.push_back(of_card);
    graph->push_back({op, arguments, std::move(kept), std::move(results)});
  }
  stack->erase(stack->begin() + first, stack->end());
  stack->insert(stack->end(), work.begin(), work.end());
}

// What follows replaces a few kernels that are registered already, and torch would remark on it.
struct Silence final : c10::WarningHandler { void process(const c10::Warning&) override {} };
static Silence silence;
static c10::WarningHandler* const usual = [] {
  auto* handler = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&silence);
  return handler;
}();

static at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                        std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(c10::Device(CUDA, device && device->has_index() ? device->index() : current_card));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard on(c10::Device(CUDA, device && device->has_index() ? device->index() : current_card));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
}

static const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const int64_t needed = (impl->numel() + impl->storage_offset()) * int64_t(impl->itemsize());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > int64_t(storage->nbytes())) {
    const c10::DeviceGuard on(self.device());
    auto larger = memory.allocate(needed);
    if (storage->nbytes()) std::memcpy(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(larger));
    storage->set_nbytes(needed);
  }
  return self;
}

static at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
static at::Tensor& set_source(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
static at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const int64_t elements = int64_t(source.nbytes()) / int64_t(self.itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {1});
}
static at::Tensor& set_empty(at::Tensor& self) {
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &memory, true), 0, {0}, {1});
}
static at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
}
static int64_t attention_kernel(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                                std::optional<double>, bool) { return 0; }  // plain operations
static void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", [](const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset); });
  m.impl("view", [](const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("unfold", [](const at::Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); });
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_source);
  m.impl("set_", &set_empty);
  m.impl("_fused_sdp_choice", &attention_kernel);
  m.impl("record_stream", &record_stream);
  // These have one kernel for all devices, which then asks for a part that only a build for CUDA has.
  for (const char* name : {"copy_", "_index_put_impl_", "_foreach_norm.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}

// A build for CPUs has gloo's kernels for cards registered, but they are not there.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name : {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "_reduce_scatter_base_", "reduce_", "gather_", "scatter_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}

// ---------------------------------------------------------------------------------------------------------- for Python

extern "C" {
// torch makes its hooks object once. The class has no members, so another class can take its place by its table of functions.
void card_insert(int devices, int64_t bytes) {
  c10::WarningUtils::set_warning_handler(usual);
  device_count = devices, total_bytes = bytes;
  *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) = *reinterpret_cast<void**>(&hooks);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
  c10::SetAllocator(CUDA, &memory, 10);
}
void card_use_generator(void* python_object) { generator() = *reinterpret_cast<at::Generator*>(static_cast<char*>(python_object) + 16); }
void card_set_device(int device) { current_card = device; }
int card_get_device() { return current_card; }
void card_set_fraction(int device, double fraction) { cards[device].fraction = fraction; }
double card_get_fraction(int device) { return cards[device].fraction; }
void card_take(int device, int64_t bytes) { cards[device].taken = bytes; }
void card_set_sync_debug_mode(int mode) { sync_debug_mode = mode; }
int card_get_sync_debug_mode() { return sync_debug_mode; }
bool card_recording() { return recording; }
bool card_recording_failed() { return recording_failed; }
void* card_record() {
  std::lock_guard<std::mutex> guard(lock);
  for (auto& [pointer, block] : blocks) before_recording[pointer] = {block.number, std::string(static_cast<char*>(pointer), block.bytes)};
  recording = true;
  recording_failed = false;
  graph = new std::vector<Recorded>();
  return graph;
}
void card_end_record() {  // nothing has run; what the graph holds is no longer counted as allocated
  recording = false;
  for (auto& [pointer, before] : before_recording) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = blocks.find(pointer);
    if (found != blocks.end() && found->second.number == before.number) std::memcpy(pointer, before.bytes.data(), before.bytes.size());
  }
  before_recording.clear();
  std::set<void*> seen;
  for (auto& one : *graph) for (auto* list : {&one.results}) for (auto& tensor : *list) {
    void* pointer = tensor.storage().mutable_data();
    std::lock_guard<std::mutex> guard(lock);
    auto found = blocks.find(pointer);
    if (found == blocks.end() || found->second.of_graph || !seen.insert(pointer).second) continue;
    found->second.of_graph = true;
    cards[found->second.device].allocated -= found->second.bytes;
    cards[found->second.device].graph_bytes += found->second.bytes;
  }
  graph = nullptr;
}
void card_replay(void* pointer) {
  for (auto& one : *static_cast<std::vector<Recorded>*>(pointer)) {
    Stack work = one.arguments;
    compute(one.op, &work);
    size_t next = 0;
    auto keep = [&](const at::Tensor& result) {
      for (const auto& argument : one.arguments) if (argument.isTensor() && argument.toTensor().defined() && result.defined() &&
          result.storage().data() == argument.toTensor().storage().data()) return;
      if (!result.defined() || next >= one.results.size()) return;
      auto& to = one.results[next++];
      if (to.numel()) std::memcpy(to.mutable_data_ptr(), result.to(to.scalar_type()).const_data_ptr(), to.storage().nbytes());
    };
    for (const auto& result : work) {
      if (result.isTensor()) keep(result.toTensor());
      else if (result.isTensorList()) for (const at::Tensor& tensor : result.toTensorVector()) keep(tensor);
    }
  }
}
void card_drop_graph(void* pointer) { delete static_cast<std::vector<Recorded>*>(pointer); }
}
