// What libraries other than the runtime do: cuBLAS, NVRTC (kernels that PyTorch compiles when they are
// first called), the driver (these, and kernels of Triton).
//
// build.py generates the rest: kernels of cuBLAS are counted, and other calls do nothing.
#include "null.h"

#include <cstdlib>
#include <cstring>

namespace null {

static thread_local cudaStream_t cublas_stream = nullptr;

static int new_handle(void** handle) {
  *handle = calloc(1, 512);  // PyTorch keeps the few that it creates, or destroys them
  return 0;
}
static int delete_handle(void* handle) {
  free(handle);
  return 0;
}

}  // namespace null

using namespace null;

// Called by what build.py generates

extern "C" void null_kernel(const char* name) { launch(name, cublas_stream); }
extern "C" void null_other(const char* name) { count("other", name); }

// cuBLAS

API int cublasCreate_v2(void** handle) { return new_handle(handle); }
API int cublasDestroy_v2(void* handle) { return delete_handle(handle); }
API int cublasSetStream_v2(void*, cudaStream_t stream) {
  cublas_stream = stream;
  return 0;
}
API int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
API int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
API size_t cublasLtGetVersion() { return 130100; }
API int cublasLtCreate(void** handle) { return new_handle(handle); }
API int cublasLtMatmulDescCreate(void** handle, int, int) { return new_handle(handle); }
API int cublasLtMatrixLayoutCreate(void** handle, int, unsigned long long, unsigned long long,
                                   long long) {
  return new_handle(handle);
}
API int cublasLtMatmulPreferenceCreate(void** handle) { return new_handle(handle); }
API int cublasLtMatmulDescDestroy(void* handle) { return delete_handle(handle); }
API int cublasLtMatrixLayoutDestroy(void* handle) { return delete_handle(handle); }
API int cublasLtMatmulPreferenceDestroy(void* handle) { return delete_handle(handle); }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                       void* results, int* found) {
  memset(results, 0, 96);  // sizeof(cublasLtMatmulHeuristicResult_t): no workspace is needed
  *found = 1;
  return 0;
}

// NVRTC. Nothing is compiled: a kernel's lowered name is the expression that names it.

API int nvrtcVersion(int* major, int* minor) {
  *major = CUDART_VERSION / 1000;
  *minor = CUDART_VERSION % 1000 / 10;
  return 0;
}
API int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*,
                           const char* const*) {
  return new_handle(program);
}
API int nvrtcDestroyProgram(void** program) { return delete_handle(*program); }
API int nvrtcAddNameExpression(void*, const char*) { return 0; }
API int nvrtcCompileProgram(void*, int, const char* const*) { return 0; }
API int nvrtcGetLoweredName(void*, const char* expression, const char** name) {
  *name = strdup(expression);  // kept, as is the kernel
  return 0;
}
static int one_byte(size_t* size) {
  *size = 1;
  return 0;
}
API int nvrtcGetCUBINSize(void*, size_t* size) { return one_byte(size); }
API int nvrtcGetPTXSize(void*, size_t* size) { return one_byte(size); }
API int nvrtcGetProgramLogSize(void*, size_t* size) { return one_byte(size); }
API int nvrtcGetCUBIN(void*, char* text) { return *text = 0; }
API int nvrtcGetPTX(void*, char* text) { return *text = 0; }
API int nvrtcGetProgramLog(void*, char* text) { return *text = 0; }
API const char* nvrtcGetErrorString(int) { return "an error of the null device"; }

// The driver. Handles are never read.

API int cuInit(unsigned) { return 0; }
API int cuDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return 0;
}
API int cuDeviceGet(int* device, int number) {
  *device = number;
  return 0;
}
API int cuDeviceGetCount(int* count) {
  *count = device_count();
  return 0;
}
API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}
API int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = (void*)1;
  return 0;
}
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
  if (flags) *flags = 0;
  *is_active = 1;
  return 0;
}
API int cuCtxGetCurrent(void** context) {
  *context = (void*)1;
  return 0;
}
API int cuCtxSetCurrent(void*) { return 0; }
API int cuCtxGetDevice(int* device) {
  *device = current_device();
  return 0;
}
API int cuCtxGetLimit(size_t* value, int) {
  *value = 0;
  return 0;
}
API int cuCtxSetLimit(int, size_t) { return 0; }
API int cuGetErrorString(int, const char** text) {
  *text = "an error of the null device";
  return 0;
}
API int cuPointerGetAttribute(void* value, int attribute, unsigned long long address) {
  const int device_pointer = 3;  // CU_POINTER_ATTRIBUTE_DEVICE_POINTER
  *(unsigned long long*)value = attribute == device_pointer ? address : 0;
  return 0;
}

API int cuModuleLoad(void** module, const char*) {
  *module = (void*)1;
  return 0;
}
API int cuModuleLoadData(void** module, const void*) { return cuModuleLoad(module, nullptr); }
API int cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void*) {
  return cuModuleLoad(module, nullptr);
}
API int cuModuleUnload(void*) { return 0; }
API int cuModuleGetFunction(void** function, void*, const char* name) {
  *function = malloc(1);
  name_function(*function, name);
  return 0;
}
API int cuFuncGetAttribute(int* value, int attribute, void*) {
  const int max_threads = 0, registers = 4;
  *value = attribute == max_threads ? 1024 : attribute == registers ? 32 : 0;
  return 0;
}
API int cuFuncSetAttribute(void*, int, int) { return 0; }
API int cuFuncSetCacheConfig(void*, int) { return 0; }
API int cuOccupancyMaxActiveClusters(int* clusters, void*, const void*) {
  *clusters = 66;
  return 0;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
  *blocks = 2;
  return 0;
}
API int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       unsigned, void* stream, void**, void**) {
  return launch_function(function, (cudaStream_t)stream);
}
struct LaunchConfig {  // the start of CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
};
API int cuLaunchKernelEx(const LaunchConfig* config, void* function, void**, void**) {
  return launch_function(function, (cudaStream_t)config->stream);
}
