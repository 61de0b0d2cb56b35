// The CUDA runtime: devices, kernels, streams, events, graphs.
#include "null.h"

#include <cxxabi.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <unordered_map>
#include <vector>

namespace null {

namespace {

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;
long pieces_of_work = 0;
int active_captures = 0;

std::vector<Stream*>& streams() {  // the first ones are the default streams of the devices
  static auto* only = [] {
    auto* all = new std::vector<Stream*>;
    for (int i = 0; i < device_count(); i++) all->push_back(new Stream{i});
    return all;
  }();
  return *only;
}

std::unordered_map<const void*, std::string>& kernel_names() {
  static auto* only = new std::unordered_map<const void*, std::string>;
  return *only;
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status ? name : text;
  free(text);
  return result;
}

int count_devices() {
  const char* wanted = getenv("NULL_GPUS");
  const int present = wanted ? atoi(wanted) : 8;
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return present;
  std::stringstream list(visible);
  std::string number;
  int count = 0;
  while (std::getline(list, number, ',')) {
    char* end;
    const long device = strtol(number.c_str(), &end, 10);
    if (end == number.c_str() || device < 0 || device >= present) break;  // as CUDA does
    count++;
  }
  return count;
}

}  // namespace

int device_count() {
  static const int count = count_devices();
  return count;
}

size_t memory_size() {
  static const char* wanted = getenv("NULL_MEMORY");
  static const size_t size = (wanted ? atof(wanted) : 80.0) * (1ull << 30);
  return size;
}

int current_device() { return device; }

cudaError_t fail(cudaError_t error) { return last_error = error; }

Stream* stream_of(cudaStream_t handle) {
  const bool is_default = (uintptr_t)handle <= 2;  // 0, cudaStreamLegacy, cudaStreamPerThread
  return is_default ? streams()[device] : (Stream*)handle;
}

cudaError_t refuse_in_capture(Stream* stream) {
  Lock lock;
  if (stream ? stream->capture == nullptr : active_captures == 0) return cudaSuccess;
  if (stream) stream->capture->is_valid = false;
  return fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t enqueue(const char* kind, const std::string& name, cudaStream_t handle, double bytes) {
  Lock lock;
  auto* stream = stream_of(handle);
  if (stream->device != device) return fail(cudaErrorInvalidResourceHandle);
  if (!stream->capture) {
    stream->given = ++pieces_of_work;
    count(kind, name, bytes);
    return cudaSuccess;
  }
  stream->capture->kernels++;
  if (stream != stream->capture->origin) stream->is_joined = false;
  count("captured", name, bytes);
  return cudaSuccess;
}

cudaError_t launch(const std::string& name, cudaStream_t stream) {
  return enqueue("kernel", name, stream);
}

void name_function(const void* function, const std::string& name) {
  Lock lock;
  kernel_names()[function] = name;
}

cudaError_t launch_function(const void* function, cudaStream_t stream) {
  static auto* demangled_names = new std::unordered_map<const void*, std::string>;
  Lock lock;
  auto& name = (*demangled_names)[function];
  if (name.empty()) {
    auto found = kernel_names().find(function);
    name = found == kernel_names().end() ? "unknown" : demangled(found->second);
  }
  return launch(name, stream);
}

namespace {

struct Event {
  Stream* stream = nullptr;  // in which it was recorded last
  Capture* capture = nullptr;
  long given = 0;  // the work of the stream up to there
};

struct Graph {
  long kernels;
};

struct Launch {  // kernel<<<grid, block, shared, stream>>>
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Launch> launches;

// Wait for the work of a stream up to a piece of it.
void wait_for(Stream* stream, long given, const char* call) {
  if (given > stream->waited) {
    count_wait(call);
    stream->waited = given;
  }
}

}  // namespace

}  // namespace null

using namespace null;

// Kernels: what the compiler's code calls when a library is loaded, and at <<<...>>>

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*,
                                void*, void*, void*, int*) {
  name_function(host, name);
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                         cudaStream_t stream) {
  launches.push_back({grid, block, shared, stream});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (launches.empty()) return fail(cudaErrorInvalidValue);
  auto launch = launches.back();
  launches.pop_back();
  *grid = launch.grid;
  *block = launch.block;
  *shared = launch.shared;
  *(cudaStream_t*)stream = launch.stream;
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t,
                                   cudaStream_t stream) {
  return launch_function((const void*)kernel, stream);
}
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t,
                                 cudaStream_t stream) {
  return launch_function(function, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t,
                                            cudaStream_t stream) {
  return launch_function(function, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                    void**) {
  return launch_function(function, config->stream);
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (!stream_of(stream)->capture) function(data);
  return cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                              size_t) {
  *blocks = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*,
                                                                       int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// Devices, with the figures of an H100

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* number) {
  *number = device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int number) {
  if (number < 0 || number >= device_count()) return fail(cudaErrorInvalidDevice);
  device = number;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int number) {
  if (number < 0 || number >= device_count()) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "null H100");
  p->uuid.bytes[0] = p->pciBusID = number + 1;
  p->totalGlobalMem = memory_size();
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  p->textureAlignment = 512;
  p->asyncEngineCount = 3;
  p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = 1;
  p->managedMemory = p->cooperativeLaunch = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::unordered_map<int, int> values = {
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxBlockDimX, 1024},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
  };
  auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int number) {
  snprintf(text, size, "0000:%02x:00.0", number + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

static cudaError_t do_nothing() { return cudaSuccess; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = (void*)do_nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
  if (auto error = refuse_in_capture(nullptr)) return error;
  Lock lock;
  bool has_waited = false;
  for (auto* stream : streams()) {
    if (stream->device != device || stream->given <= stream->waited) continue;
    if (!has_waited) count_wait("cudaDeviceSynchronize");
    has_waited = true;
    stream->waited = stream->given;
  }
  return cudaSuccess;
}

// Errors

API cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle: the stream or event is not of the current device";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    default: return "an error of the null device";
  }
}
API const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorNull";
}

// Streams

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  Lock lock;
  streams().push_back(new Stream{device});  // PyTorch keeps its streams
  *stream = (cudaStream_t)streams().back();
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return refuse_in_capture(stream_of(stream));
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  auto* stream = stream_of(handle);
  if (auto error = refuse_in_capture(stream)) return error;
  Lock lock;
  wait_for(stream, stream->given, "cudaStreamSynchronize");
  return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                      void* data, unsigned) {
  if (auto error = refuse_in_capture(stream_of(stream))) return error;
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  Lock lock;
  auto* stream = stream_of(handle);
  auto* event = (Event*)event_handle;
  if (!event->capture || !event->capture->is_active) return cudaSuccess;
  if (!stream->capture) {  // it joins the capture
    stream->capture = event->capture;
    stream->is_joined = false;
  } else if (event->stream != stream) {
    event->stream->is_joined = true;
  }
  return cudaSuccess;
}

// Graphs

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock;
  auto* capture = stream_of(stream)->capture;
  *status = !capture             ? cudaStreamCaptureStatusNone
            : capture->is_valid ? cudaStreamCaptureStatusActive
                                 : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** dependencies,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = (unsigned long long)stream_of(stream)->capture;
  if (graph) *graph = (cudaGraph_t)1;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  Lock lock;
  auto* stream = stream_of(handle);
  const bool is_default = (uintptr_t)handle <= 2;
  if (is_default || stream->capture) return fail(cudaErrorStreamCaptureUnsupported);
  stream->capture = new Capture{stream};  // events may refer to it forever
  active_captures++;
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Lock lock;
  auto* capture = stream_of(handle)->capture;
  if (!capture || capture->origin != stream_of(handle)) return fail(cudaErrorIllegalState);
  bool is_joined = true;
  for (auto* stream : streams()) {
    if (stream->capture != capture) continue;
    is_joined = is_joined && (stream == capture->origin || stream->is_joined);
    stream->capture = nullptr;
    stream->is_joined = true;
  }
  capture->is_active = false;
  active_captures--;
  *graph = nullptr;
  if (!capture->is_valid) return fail(cudaErrorStreamCaptureInvalidated);
  if (!is_joined) return fail(cudaErrorStreamCaptureUnjoined);
  *graph = (cudaGraph_t) new Graph{capture->kernels};
  count("graph", "captured");
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                              unsigned long long) {
  *executable = (cudaGraphExec_t)graph;  // a Graph is small, and never freed
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const long kernels = ((Graph*)executable)->kernels;
  return enqueue("graph", "launched, of " + std::to_string(kernels) + " kernels", stream);
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = ((Graph*)graph)->kernels;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

// Events

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock;
  delete (Event*)event;
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle,
                                         unsigned flags) {
  Lock lock;
  auto* stream = stream_of(stream_handle);
  if (stream->device != device) return fail(cudaErrorInvalidResourceHandle);
  auto* event = (Event*)handle;
  event->stream = stream;
  event->capture = flags & cudaEventRecordExternal ? nullptr : stream->capture;
  event->given = stream->given;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
  return ((Event*)event)->capture ? fail(cudaErrorCapturedEvent) : cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Lock lock;
  auto* event = (Event*)handle;
  if (event->capture) return fail(cudaErrorCapturedEvent);
  if (event->stream) wait_for(event->stream, event->given, "cudaEventSynchronize");
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = 1;  // it has no meaning
  const bool is_captured = ((Event*)from)->capture || ((Event*)to)->capture;
  return is_captured ? fail(cudaErrorInvalidValue) : cudaSuccess;
}
