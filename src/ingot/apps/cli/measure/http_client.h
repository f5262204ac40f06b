#pragma once
// A small HTTP/1.1 client for measurements: one connection that stays open, whole request bodies, and answer bodies
// passed on as they arrive. Plain HTTP only.
#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ingot {

struct HttpUrl {
  std::string host;
  int port = 80;
  std::string path;  // without a slash at the end
};
std::string to_text(const HttpUrl& url);
// Parses http://HOST[:PORT][/PATH]. Throws Error{usage} for anything else, also for https.
HttpUrl http_url(const std::string& text);

// Decodes a body with "Transfer-Encoding: chunked", which may arrive divided in any way.
class ChunkedBody {
 public:
  // Passes the data among these bytes to `data`. Throws Error{bad_data} where the bytes are not chunks.
  void push(std::string_view bytes, const std::function<void(std::string_view)>& data);
  bool complete() const { return state_ == State::complete; }

 private:
  enum class State { size, data, data_end, trailer, complete };
  void end_line();
  State state_ = State::size;
  std::string line_;
  uint64_t left_ = 0;  // bytes left in the present chunk
};

class HttpConnection {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;
  // `seconds`: how long to wait for a connection, and for the next bytes of an answer. Connects with the first request.
  HttpConnection(HttpUrl url, double seconds) : url_(std::move(url)), seconds_(seconds) {}
  ~HttpConnection() { close(); }
  HttpConnection(const HttpConnection&) = delete;

  // Sends a request for the URL's path followed by `path`, and passes the bytes of the answer's body to `on_body` as
  // they arrive. Returns the status. Error{io} where the server cannot be reached, ends the connection before the
  // answer is complete, or sends nothing in time. A connection that the server has closed since the last answer is
  // opened again.
  int request(const char* method, const std::string& path, const Headers& headers, std::string_view body,
              const std::function<void(std::string_view)>& on_body);
  void close();

 private:
  struct Head {
    int status = 0;
    bool chunked = false, keep_alive = true;
    int64_t length = -1;  // length of the body; -1: until the connection ends
    std::string rest;     // bytes of the body that arrived with the head
  };
  void connect();
  void send(std::string_view bytes);
  size_t receive(char* to, size_t most);  // 0: the server has ended the connection
  Head read_head();
  static Head parse_head(std::string_view text);
  void read_body(Head& head, const std::function<void(std::string_view)>& on_body);

  HttpUrl url_;
  double seconds_;
  int socket_ = -1;
};

// Extracts the data of server-sent events: the text after "data: " of each event. An event ends with an empty line.
class EventStream {
 public:
  void push(std::string_view bytes, const std::function<void(std::string_view)>& data);

 private:
  std::string line_, data_;
};

}  // namespace ingot
