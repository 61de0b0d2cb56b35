// What the parts of the null device share: counts, devices, streams, captures.
//
// A stream does its work at once, because there is none: what it keeps is whether work was given to
// it that the host has not waited for, and whether it is being captured.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <string>

// Exported in place of the function of that name in CUDA's libraries.
#define API extern "C" __attribute__((visibility("default")))

namespace null {

// One lock for all: there is no work that could go on at the same time. Recursive, because the
// functions below are called with and without it.
std::recursive_mutex& mutex();
struct Lock : std::lock_guard<std::recursive_mutex> {
  Lock() : std::lock_guard<std::recursive_mutex>(mutex()) {}
};

// Add 1 to the number, and `bytes` to the bytes, of what has this kind ("kernel", "copy", "wait",
// "collective", "graph", "memory", "other") and name.
void count(const char* kind, const std::string& name, double bytes = 0);

// Count a wait of the host, by the call that waits and the Python frames that lead to it.
void count_wait(const char* call);

// Record a collective in the log of its communicator, which `tools/null/report.py` compares between
// the ranks.
void log_collective(const std::string& communicator, const std::string& call);

// The GPUs that the process sees (NULL_GPUS, CUDA_VISIBLE_DEVICES), and the bytes of each
// (NULL_MEMORY, in GiB).
int device_count();
size_t memory_size();
int current_device();

struct Stream;

// The kernels between cudaStreamBeginCapture() and cudaStreamEndCapture().
struct Capture {
  Stream* origin;
  long kernels = 0;
  bool is_valid = true;  // nothing was done meanwhile that CUDA does not permit
  bool is_active = true;
};

struct Stream {
  int device;
  Capture* capture = nullptr;
  bool is_joined = true;  // the stream in which the capture began waits for it
  long given = 0;         // number of its last piece of work, among those of all streams
  long waited = 0;        // the host has waited for its work up to this number
};

// The stream of a handle; a device's default stream has none of its own.
Stream* stream_of(cudaStream_t handle);

// Give a stream a piece of work of that kind. The error if CUDA refuses that.
cudaError_t enqueue(const char* kind, const std::string& name, cudaStream_t stream,
                    double bytes = 0);

// Launch a kernel by its name, or by the function that stands for it and has been given a name.
cudaError_t launch(const std::string& name, cudaStream_t stream);
cudaError_t launch_function(const void* function, cudaStream_t stream);
void name_function(const void* function, const std::string& name);

// Refuse a call that must not be made while the stream (or, without one, any) is being captured.
cudaError_t refuse_in_capture(Stream* stream);

// What cudaGetLastError() returns next.
cudaError_t fail(cudaError_t error);

// Whether an address is in a device's memory, or in pinned memory of the host.
bool is_on_device(const void* address);
bool is_pinned(const void* address);

}  // namespace null
