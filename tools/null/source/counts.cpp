// Counts, waits with the Python lines that caused them, and logs of collectives.
#include "null.h"

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <unistd.h>
#include <utility>
#include <vector>

namespace null {

std::recursive_mutex& mutex() {
  static auto* only = new std::recursive_mutex;  // never destroyed: threads outlive main()
  return *only;
}

namespace {

using Name = std::pair<std::string, std::string>;  // kind, name

struct Count {
  long number = 0;
  double bytes = 0;
};

std::map<Name, Count>& counts() {
  static auto* only = new std::map<Name, Count>;
  return *only;
}

std::map<std::string, std::vector<std::string>>& logs() {
  static auto* only = new std::map<std::string, std::vector<std::string>>;
  return *only;
}

const size_t LONGEST_LOG = 100000;  // calls per communicator
int traceback_signal = 0, traceback_pipe = -1;

// The Python frames of this thread, the innermost first, as faulthandler writes them to a pipe. It
// needs no GIL, for which a thread that holds PyTorch's locks must not wait.
std::string python_frames() {
  if (!traceback_signal) return "";
  raise(traceback_signal);  // handled by faulthandler, in this thread, before it returns
  std::string text;
  char buffer[4096];
  for (ssize_t size; (size = read(traceback_pipe, buffer, sizeof buffer)) > 0;)
    text.append(buffer, size);
  for (char& letter : text)
    if (letter == '\n' || letter == '\t') letter = ';';
  return text;
}

}  // namespace

void count(const char* kind, const std::string& name, double bytes) {
  Lock lock;
  auto& entry = counts()[{kind, name}];
  entry.number++;
  entry.bytes += bytes;
}

void count_wait(const char* call) {
  Lock lock;
  count("wait", std::string(call) + ";" + python_frames());
}

void log_collective(const std::string& communicator, const std::string& call) {
  Lock lock;
  auto& log = logs()[communicator];
  if (log.size() < LONGEST_LOG) log.push_back(call);
}

}  // namespace null

// How Python writes a traceback: the signal that faulthandler handles, and the pipe it writes to.
API void null_trace_waits(int signal, int pipe) {
  null::traceback_signal = signal;
  null::traceback_pipe = pipe;
}

// The counts since the last call, as lines of kind, name, number and bytes, separated by tabs. The
// caller frees the text.
API char* null_take_counts() {
  null::Lock lock;
  std::string text;
  for (auto& [name, count] : null::counts())
    text += name.first + "\t" + name.second + "\t" + std::to_string(count.number) + "\t" +
            std::to_string((long long)count.bytes) + "\n";
  null::counts().clear();
  return strdup(text.c_str());
}

// The logs of all communicators, as lines of communicator and call, separated by tabs. The caller
// frees the text.
API char* null_logs() {
  null::Lock lock;
  std::string text;
  for (auto& [communicator, log] : null::logs())
    for (auto& call : log) text += communicator + "\t" + call + "\n";
  return strdup(text.c_str());
}
