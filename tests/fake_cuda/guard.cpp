// What a CPU build of torch lacks for autograd to run on fake tensors of `cuda:0`: a guard that would switch devices and
// streams, and hooks that say that there is CUDA. Both know one device and do nothing. It has to be loaded before
// `import torch`, which asks for the hooks once and keeps the answer. Methods carry no `override`: should a release of
// torch lack one of them, it is a method that nobody calls, and the file still compiles.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream) const noexcept { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const {}
  void block(void*, const c10::Stream&) const {}
  bool queryEvent(void*) const { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {  // torch looks the class up by this name
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const { return true; }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(DeviceIndex) const { return false; }
  DeviceIndex deviceCount() const { return 1; }
  DeviceIndex getCurrentDevice() const { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const { return 0; }
  void setCurrentDevice(DeviceIndex) const {}
  void init() const {}
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
