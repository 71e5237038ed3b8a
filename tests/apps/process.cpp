// Everything here is checked by hand: a helper that fails quietly would let tests pass that ran nothing.
#include "tests/apps/process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <system_error>

extern char** environ;

namespace mmrec::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kWatchdog = std::chrono::minutes(2);

void check(bool good, const char* what) {
  if (!good) throw std::system_error(errno, std::generic_category(), what);
}

struct Pipe {
  int read = -1;
  int write = -1;
  Pipe() {
    int ends[2];
    check(pipe2(ends, O_CLOEXEC) == 0, "pipe2");
    read = ends[0];
    write = ends[1];
  }
};

void close_descriptor(int& fd) {
  if (fd >= 0) (void)close(fd);
  fd = -1;
}

// A pseudo-terminal: the master's descriptor and the name of the other end.
std::pair<int, std::string> open_terminal(int columns) {
  const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  check(master >= 0, "posix_openpt");
  check(grantpt(master) == 0 && unlockpt(master) == 0, "unlockpt");
  winsize size = {};
  size.ws_col = static_cast<unsigned short>(columns);
  size.ws_row = 24;
  check(ioctl(master, TIOCSWINSZ, &size) == 0, "TIOCSWINSZ");
  std::array<char, 128> name = {};
  check(ptsname_r(master, name.data(), name.size()) == 0, "ptsname_r");
  return {master, name.data()};
}

}  // namespace

Process::Process(const Command& command) : input_(command.input.value_or("")) {
  (void)std::signal(SIGPIPE, SIG_IGN);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  std::vector<int> theirs;
  const auto give = [&](int fd, int as) {
    posix_spawn_file_actions_adddup2(&actions, fd, as);
    theirs.push_back(fd);
  };
  if (command.terminal) {
    const auto [master, name] = open_terminal(command.terminal_columns);
    err_ = master;
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, name.c_str(), O_RDWR, 0);  // and so its terminal
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, name.c_str(), O_RDWR | O_NOCTTY, 0);
  } else {
    const Pipe err;
    err_ = err.read;
    give(err.write, STDERR_FILENO);
  }
  if (command.input) {
    const Pipe in;
    in_ = in.write;
    check(fcntl(in_, F_SETFL, O_NONBLOCK) == 0, "fcntl");
    give(in.read, STDIN_FILENO);
  } else if (!command.terminal) {
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  }
  const Pipe out;
  out_ = out.read;
  give(out.write, STDOUT_FILENO);

  // The signals a shell would leave at their defaults, whatever this test runner was started with.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t defaults;
  sigemptyset(&defaults);
  for (const int signal : {SIGINT, SIGTERM, SIGPIPE}) sigaddset(&defaults, signal);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setflags(&attributes,
                           static_cast<short>(POSIX_SPAWN_SETSIGDEF | (command.terminal ? POSIX_SPAWN_SETSID : 0)));

  std::vector<char*> arguments;
  for (const std::string& argument : command.arguments) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  const int error = posix_spawnp(&pid_, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  for (int& fd : theirs) close_descriptor(fd);
  if (error != 0) throw std::system_error(error, std::generic_category(), command.arguments[0]);
}

Process::~Process() {
  if (pid_ > 0) {
    (void)kill(pid_, SIGKILL);
    (void)waitpid(pid_, nullptr, 0);
  }
  for (int* fd : {&in_, &out_, &err_}) close_descriptor(*fd);
}

// Moves what can be moved; false once there is nothing left to wait for.
bool Process::pump(bool read_out, int milliseconds) {
  if (in_ >= 0 && input_.empty()) close_descriptor(in_);
  std::array<pollfd, 3> waits = {{{in_, POLLOUT, 0}, {read_out ? out_ : -1, POLLIN, 0}, {err_, POLLIN, 0}}};
  if (std::all_of(waits.begin(), waits.end(), [](const pollfd& w) { return w.fd < 0; })) return false;
  if (poll(waits.data(), waits.size(), milliseconds) <= 0) return true;
  if (waits[0].revents != 0) {
    const ssize_t n = write(in_, input_.data(), input_.size());
    if (n > 0) input_.erase(0, static_cast<std::size_t>(n));
    if (n < 0 && errno != EAGAIN && errno != EINTR) input_.clear();
  }
  const auto drain = [](const pollfd& wait, int& fd, std::string& to) {
    if (wait.revents == 0) return;
    std::array<char, 65536> block;
    const ssize_t n = read(fd, block.data(), block.size());
    if (n > 0) to.append(block.data(), static_cast<std::size_t>(n));
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) close_descriptor(fd);  // EIO: a terminal's end
  };
  drain(waits[1], out_, outcome_.out);
  drain(waits[2], err_, outcome_.err);
  return true;
}

bool Process::read_stdout(std::size_t bytes) {
  const auto deadline = Clock::now() + kWatchdog;
  while (outcome_.out.size() < bytes && out_ >= 0 && Clock::now() < deadline) pump(true, 100);
  return outcome_.out.size() >= bytes;
}

bool Process::read_stderr(std::string_view text) {
  const auto deadline = Clock::now() + kWatchdog;
  while (outcome_.err.find(text) == std::string::npos && err_ >= 0 && Clock::now() < deadline) pump(true, 100);
  return outcome_.err.find(text) != std::string::npos;
}

void Process::type(std::string_view keys) const {
  check(write(err_, keys.data(), keys.size()) == static_cast<ssize_t>(keys.size()), "write");
}

void Process::close_stdout() { close_descriptor(out_); }

void Process::send(int signal) const { check(kill(pid_, signal) == 0, "kill"); }

bool Process::running() const {
  siginfo_t info = {};
  return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

void Process::shrink_stdout() const { check(fcntl(out_, F_SETPIPE_SZ, 4096) == 4096, "F_SETPIPE_SZ"); }

int Process::unread_stdout() const {
  int bytes = 0;
  check(ioctl(out_, FIONREAD, &bytes) == 0, "FIONREAD");
  return bytes;
}

Outcome Process::wait(bool read_out) {
  const auto deadline = Clock::now() + kWatchdog;
  while (pump(read_out, 100)) {
    if (!running() && !read_out) break;
    if (Clock::now() < deadline) continue;
    (void)kill(pid_, SIGKILL);
    outcome_.err += "\n[the watchdog ended this program]";
    break;
  }
  int status = 0;
  check(waitpid(std::exchange(pid_, -1), &status, 0) > 0, "waitpid");
  if (WIFEXITED(status)) outcome_.code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome_.signal = WTERMSIG(status);
  return outcome_;
}

Outcome run(const Command& command) { return Process(command).wait(); }

Command on_terminal(std::vector<std::string> arguments) {
  return {.arguments = std::move(arguments), .terminal = true};
}

Outcome run(std::vector<std::string> arguments, std::optional<std::string> input) {
  return run(Command{.arguments = std::move(arguments), .input = std::move(input)});
}

}  // namespace mmrec::test
