#include "ingot/apps/cli/measure/http_client.h"

#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>

#include "ingot/core/check.h"

namespace ingot {
namespace {

constexpr size_t kMostHead = 64 << 10, kMostLine = 8 << 10;

// Parses a number that takes up the whole of `text`.
template <class T> std::optional<T> number_in(std::string_view text, int base = 10) {
  T n{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n, base);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return n;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return out;
}

}  // namespace

// --- URLs

std::string to_text(const HttpUrl& url) {
  const bool v6 = url.host.find(':') != std::string::npos;
  return detail::concat("http://", v6 ? "[" + url.host + "]" : url.host, ":", url.port, url.path);
}

HttpUrl http_url(const std::string& text) {
  constexpr std::string_view kScheme = "http://";
  const auto refuse = [&] {
    fail(ErrorCode::usage, "found the URL '", text, "', expected one like http://127.0.0.1:8080");
  };
  if (!text.starts_with(kScheme)) refuse();
  const size_t slash = std::min(text.find('/', kScheme.size()), text.size());
  std::string authority = text.substr(kScheme.size(), slash - kScheme.size());
  HttpUrl url{.path = text.substr(slash)};
  while (url.path.ends_with('/')) url.path.pop_back();
  const size_t host_end = authority.starts_with('[') ? authority.find(']') : authority.find(':');
  if (authority.starts_with('[')) {
    if (host_end == std::string::npos) refuse();
    url.host = authority.substr(1, host_end - 1);
    authority.erase(0, host_end + 1);
  } else {
    url.host = authority.substr(0, host_end);
    authority.erase(0, std::min(host_end, authority.size()));
  }
  if (url.host.empty() || text.find_first_of(" \t\r\n?#@") != std::string::npos) refuse();
  if (authority.empty()) return url;
  const std::optional<int> port = number_in<int>(std::string_view(authority).substr(1));
  if (authority[0] != ':' || !port || *port < 1 || *port > 65535) refuse();
  url.port = *port;
  return url;
}

// --- bodies

void ChunkedBody::end_line() {
  if (line_.ends_with('\r')) line_.pop_back();
  if (state_ == State::size) {
    const std::string_view size = std::string_view(line_).substr(0, line_.find_first_of("; \t"));
    const std::optional<uint64_t> bytes = number_in<uint64_t>(size, 16);
    if (!bytes)
      fail(ErrorCode::bad_data, "found the chunk size '", line_.substr(0, 40), "', expected a hexadecimal number");
    left_ = *bytes;
    state_ = left_ > 0 ? State::data : State::trailer;
  } else if (state_ == State::data_end) {
    if (!line_.empty()) fail(ErrorCode::bad_data, "found bytes after a chunk, expected the end of a line");
    state_ = State::size;
  } else if (line_.empty()) {
    state_ = State::complete;
  }
  line_.clear();
}

void ChunkedBody::push(std::string_view bytes, const std::function<void(std::string_view)>& data) {
  while (!bytes.empty() && !complete()) {
    if (state_ == State::data) {
      const std::string_view part = bytes.substr(0, size_t(std::min<uint64_t>(left_, bytes.size())));
      data(part);
      bytes.remove_prefix(part.size());
      left_ -= part.size();
      if (left_ == 0) state_ = State::data_end;
      continue;
    }
    const size_t end = bytes.find('\n');
    line_ += bytes.substr(0, end);
    if (line_.size() > kMostLine) fail(ErrorCode::bad_data, "found a line of a chunked body that does not end");
    bytes.remove_prefix(std::min(end == bytes.npos ? end : end + 1, bytes.size()));
    if (end != std::string_view::npos) end_line();
  }
}

void EventStream::push(std::string_view bytes, const std::function<void(std::string_view)>& data) {
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    line_ += bytes.substr(0, end);
    bytes.remove_prefix(std::min(end == bytes.npos ? end : end + 1, bytes.size()));
    if (end == std::string_view::npos) return;
    if (line_.ends_with('\r')) line_.pop_back();
    if (line_.empty()) {
      if (!data_.empty()) data(data_);
      data_.clear();
    } else if (line_.starts_with("data:")) {
      data_ += std::string_view(line_).substr(line_.starts_with("data: ") ? 6 : 5);
    }
    line_.clear();
  }
}

// --- connections

void HttpConnection::close() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
}

void HttpConnection::connect() {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = ::getaddrinfo(url_.host.c_str(), std::to_string(url_.port).c_str(), &hints, &found); error != 0)
    fail(ErrorCode::io, to_text(url_), ": ", ::gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, ::freeaddrinfo);
  int error = 0;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    socket_ = ::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (socket_ < 0) fail(ErrorCode::io, to_text(url_), ": ", std::strerror(errno));
    // connect() takes the time limit of sending.
    const timeval limit{.tv_sec = time_t(seconds_),
                        .tv_usec = suseconds_t(1e6 * (seconds_ - double(time_t(seconds_))))};
    ::setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    const int on = 1;
    ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (::connect(socket_, a->ai_addr, a->ai_addrlen) == 0) return;
    error = errno == EINPROGRESS ? ETIMEDOUT : errno;
    close();
  }
  fail(ErrorCode::io, to_text(url_), ": ", std::strerror(error));
}

void HttpConnection::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(ErrorCode::io, to_text(url_), ": sending: ", std::strerror(errno));
    bytes.remove_prefix(size_t(n));
  }
}

size_t HttpConnection::receive(char* to, size_t most) {
  for (;;) {
    const ssize_t n = ::recv(socket_, to, most, 0);
    if (n >= 0) return size_t(n);
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK)
      fail(ErrorCode::io, to_text(url_), ": no byte of an answer within ", seconds_, " s");
    fail(ErrorCode::io, to_text(url_), ": receiving: ", std::strerror(errno));
  }
}

HttpConnection::Head HttpConnection::parse_head(std::string_view text) {
  Head head;
  const size_t space = text.find(' ');
  const std::optional<int> status =
      text.starts_with("HTTP/1.") && space < text.size() ? number_in<int>(text.substr(space + 1, 3)) : std::nullopt;
  if (!status) fail(ErrorCode::bad_data, "found an answer that is no HTTP/1.1");
  head.status = *status;
  head.keep_alive = text.starts_with("HTTP/1.1");
  for (size_t at = text.find('\n'); at < text.size();) {
    const size_t end = std::min(text.find('\n', at + 1), text.size());
    const std::string line = lower(text.substr(at + 1, end - at - 1));
    at = end;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string name = line.substr(0, colon);
    const size_t begin = line.find_first_not_of(" \t", colon + 1), last = line.find_last_not_of(" \t\r");
    const std::string value = begin == std::string::npos ? "" : line.substr(begin, last + 1 - begin);
    if (name == "transfer-encoding") head.chunked = value.ends_with("chunked");
    if (name == "connection") head.keep_alive = value != "close";
    if (name != "content-length") continue;
    const std::optional<int64_t> length = number_in<int64_t>(value);
    if (!length || *length < 0) fail(ErrorCode::bad_data, "found the content length '", value, "', expected a number");
    head.length = *length;
  }
  if (head.status == 204 || head.status == 304) head.length = 0;
  if (head.chunked) head.length = -1;
  return head;
}

HttpConnection::Head HttpConnection::read_head() {
  std::string text;
  std::array<char, 16 << 10> piece;
  for (;;) {
    const size_t n = receive(piece.data(), piece.size());
    if (n == 0) fail(ErrorCode::io, to_text(url_), ": the connection ended before an answer");
    text.append(piece.data(), n);
    const size_t end = text.find("\r\n\r\n");
    if (end == std::string::npos && text.size() > kMostHead)
      fail(ErrorCode::bad_data, to_text(url_), ": found a header of more than ", kMostHead, " bytes");
    if (end == std::string::npos) continue;
    Head head = parse_head(std::string_view(text).substr(0, end + 2));
    text.erase(0, end + 4);
    if (head.status >= 100 && head.status < 200) continue;  // an interim answer
    head.rest = std::move(text);
    return head;
  }
}

void HttpConnection::read_body(Head& head, const std::function<void(std::string_view)>& on_body) {
  ChunkedBody chunks;
  std::array<char, 16 << 10> piece;
  std::string_view bytes = head.rest;
  int64_t left = head.length;
  for (;;) {
    if (head.chunked) {
      chunks.push(bytes, on_body);
    } else {
      const std::string_view part = left >= 0 ? bytes.substr(0, size_t(left)) : bytes;
      if (!part.empty()) on_body(part);
      if (left >= 0) left -= int64_t(part.size());
    }
    if (head.chunked ? chunks.complete() : left == 0) return;
    const size_t n = receive(piece.data(), piece.size());
    bytes = {piece.data(), n};
    if (n > 0) continue;
    if (head.chunked || left > 0)
      fail(ErrorCode::io, to_text(url_), ": the connection ended before the end of an answer");
    head.keep_alive = false;
    return;
  }
}

int HttpConnection::request(const char* method, const std::string& path, const Headers& headers, std::string_view body,
                            const std::function<void(std::string_view)>& on_body) {
  const bool v6 = url_.host.find(':') != std::string::npos;
  std::string text =
      detail::concat(method, " ", url_.path, path, " HTTP/1.1\r\nHost: ", v6 ? "[" + url_.host + "]" : url_.host, ":",
                     url_.port, "\r\n");
  for (const auto& [name, value] : headers) text += name + ": " + value + "\r\n";
  if (!body.empty()) text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
  text += "\r\n";
  text += body;
  char byte;
  if (socket_ >= 0 && ::recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) close();
  if (socket_ < 0) connect();
  try {
    send(text);
    Head head = read_head();
    read_body(head, on_body);
    if (!head.keep_alive) close();
    return head.status;
  } catch (...) {
    close();  // else the rest of this answer would be read as the next answer
    throw;
  }
}

}  // namespace ingot
