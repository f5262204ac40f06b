#include "ingot/apps/server/server.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netdb.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "ingot/apps/server/request_header.h"
#include "ingot/core/clock.h"
#include "ingot/core/log.h"
#include "ingot/engines/serve/messages.h"
#include "ingot/io/codecs/sha256.h"

namespace ingot::server {
namespace {

// The page; @NONCE@ marks the nonces that let its own script and style pass the content security policy.
const std::string kPage =
#include <ingot_page.inc>
    ;

// A connection, idle between two requests or busy with one request.
struct Connection {
  int descriptor = -1;
  bool busy = false, abrupt = false;
  Clock::time_point since = Clock::now();

  // Whether closing the connection drops the bytes that its client has not read; otherwise the system would keep the
  // bytes for minutes.
  void set_abrupt(bool yes) {
    if (yes == std::exchange(abrupt, yes)) return;
    const linger none{.l_onoff = yes, .l_linger = 0};
    ::setsockopt(descriptor, SOL_SOCKET, SO_LINGER, &none, sizeof none);
  }
};

// An answer between the scheduler's thread and a connection, which is suspended while there is nothing to send. A
// client that reads more slowly than tokens come gets no more tokens until half of the waiting bytes have been read.
struct Delivery {
  static constexpr size_t kMostWaiting = 256 << 10;
  static constexpr double kSlowest = 4096;  // bytes a second that the reader of an ended answer must take

  std::mutex mutex;
  MHD_Connection* connection = nullptr;  // null once the request has ended
  bool streams = false, asleep = false, ended = false;
  bool of_messages = false;  // Exchange
  int status = 200;
  std::string waiting;  // bytes to send
  double stall_seconds = 0;
  Clock::time_point latest = Clock::now();
  bool behind = false;
  Clock::time_point behind_since;
  double patience = 0;  // seconds from the moment the client falls behind

  // Under the mutex.
  void wake() {
    if (asleep && connection != nullptr) {
      asleep = false;
      MHD_resume_connection(connection);
    }
  }
  void sleep() {
    asleep = true;
    MHD_suspend_connection(connection);
  }
  void fall_behind(double seconds) {
    if (!behind) behind_since = Clock::now();
    behind = true;
    patience = seconds;
  }
  void push(const std::string& bytes) {
    const std::lock_guard lock(mutex);
    if (ended) return;  // the answer was cut off
    waiting += bytes;
    latest = Clock::now();
    if (waiting.size() > kMostWaiting) fall_behind(stall_seconds);
    wake();
  }
  void took(size_t n) {
    waiting.erase(0, n);
    if (!ended && waiting.size() < kMostWaiting / 2) behind = false;
  }
  bool ready() {
    const std::lock_guard lock(mutex);
    return !behind;
  }
  // Only the first call has an effect.
  void end(int code, const std::string& body) {
    const std::lock_guard lock(mutex);
    if (ended) return;
    status = code;
    waiting += body;
    ended = true;
    behind = false;
    fall_behind(stall_seconds + double(waiting.size()) / kSlowest);  // time to read the rest
    wake();
  }
  // For an answer that the scheduler does not end in time.
  void cut_off(const ApiError& e) {
    const std::string json = of_messages ? to_messages_json(e) : to_json(e);
    end(e.status, !streams ? json : (of_messages ? "event: error\ndata: " : "data: ") + json + "\n\n");
  }
};

struct Reply {
  int status = 200;
  std::string body, type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
  bool close = false;
};

struct Exchange {
  Connection* connection = nullptr;
  MHD_Connection* http = nullptr;
  std::atomic<bool> post = false;  // the request has a body; read by the watcher
  enum class Kind { completion, chat, responses, messages, count_tokens, tokenize, detokenize };  // answers first
  Kind kind = Kind::completion;
  bool of_messages = false;  // errors have Anthropic's form
  std::string client, origin, body;
  size_t received = 0;
  Clock::time_point started = Clock::now();
  int64_t pieces = 0;  // pieces in which the body arrived
  std::optional<Reply> reply;
  std::shared_ptr<void> announced;  // while the body of a request for an answer is being received
  std::shared_ptr<Delivery> delivery;
  std::shared_ptr<Service::Ticket> ticket;
};

Reply error_reply(const Exchange& x, const ApiError& e, bool close = false) {
  return {.status = e.status, .body = (x.of_messages ? to_messages_json(e) : to_json(e)) + "\n", .close = close};
}

// Compares in a time that does not depend on the contents.
bool same(const std::string& a, const std::string& b) {
  unsigned differ = a.size() != b.size();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) differ |= unsigned(a[i] ^ b[i]);
  return differ == 0;
}

std::string nonce() {
  std::random_device device;
  char text[33];
  std::snprintf(text, sizeof text, "%08x%08x%08x%08x", device(), device(), device(), device());
  return text;
}
Reply page_reply() {
  const std::string word = nonce();
  std::string page = kPage;
  for (size_t at; (at = page.find("@NONCE@")) != std::string::npos;) page.replace(at, 7, word);
  const std::string policy =
      "default-src 'none'; script-src 'nonce-" + word + "'; style-src 'nonce-" + word +
      "'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
  return {.body = page,
          .type = "text/html; charset=utf-8",
          .headers = {
              {"Content-Security-Policy", policy}, {"Referrer-Policy", "no-referrer"}, {"Cache-Control", "no-store"}}};
}

}  // namespace

struct Server::Impl {
  const ServerOptions options;
  std::vector<std::string> key_hashes;
  MHD_Daemon* daemon = nullptr;
  int listener = -1;  // closed by the daemon
  std::atomic<Service*> service = nullptr;
  std::atomic<bool> stopping = false, watching = true;
  std::mutex mutex;
  std::set<Connection*> connections;
  std::set<Exchange*> exchanges;
  std::thread watcher;

  explicit Impl(const ServerOptions& o) : options(o) {
    for (const std::string& key : o.keys) key_hashes.push_back(sha256(key));
  }

  // --- who may ask
  void check_host(MHD_Connection* c) const {
    const std::string host = lower(without_port(header(c, "Host")));
    if (!options.hosts.empty() && std::find(options.hosts.begin(), options.hosts.end(), host) == options.hosts.end())
      throw ApiError(403, "found a host that this server is not known by; --allow-host adds one", "",
                     "host_not_allowed");
  }
  // Pages of another origin may send requests if the origin is allowed. Returns the origin to name in the answer, or
  // "".
  std::string check_origin(MHD_Connection* c) const {
    const char* origin = header(c, "Origin");
    if (origin == nullptr) return "";
    const std::string host = header(c, "Host");
    if (origin == "http://" + host || origin == "https://" + host) return "";
    if (std::find(options.origins.begin(), options.origins.end(), origin) == options.origins.end())
      throw ApiError(403, "found an origin that may not ask here; --cors-origin adds one", "", "origin_not_allowed");
    return origin;
  }
  std::string check_key(MHD_Connection* c) const {
    if (key_hashes.empty()) return "";
    // Anthropic's clients send x-api-key, and some of them send both headers.
    const auto given = headers(c, "Authorization"), plain = headers(c, "X-Api-Key");
    std::string key;
    if (given.empty() && plain.size() == 1) key = plain[0];
    if (given.size() == 1 && lower(given[0].substr(0, 7)) == "bearer ") key = given[0].substr(7);
    const std::string hash = sha256(key);
    bool known = false;
    for (const std::string& h : key_hashes) known |= same(h, hash);
    if (!known || given.size() + plain.size() == 0 || given.size() > 1)
      throw ApiError(401, "found no API key that is known here", "", "invalid_api_key");
    return hash;
  }

  // --- answering
  static MHD_Result send(Exchange& x, const Reply& r) {
    MHD_Response* response =
        MHD_create_response_from_buffer(r.body.size(), const_cast<char*>(r.body.data()), MHD_RESPMEM_MUST_COPY);
    return queue(x, response, r);
  }
  static MHD_Result queue(Exchange& x, MHD_Response* response, const Reply& r) {
    if (response == nullptr) return MHD_NO;
    MHD_add_response_header(response, "Content-Type", r.type.c_str());
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    for (const auto& [name, value] : r.headers) MHD_add_response_header(response, name.c_str(), value.c_str());
    if (!x.origin.empty()) {
      MHD_add_response_header(response, "Access-Control-Allow-Origin", x.origin.c_str());
      MHD_add_response_header(response, "Vary", "Origin");
    }
    if (r.status == 401) MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (r.status == 429 || r.status == 503) MHD_add_response_header(response, "Retry-After", "1");
    if (r.close) MHD_add_response_header(response, "Connection", "close");
    const MHD_Result result = MHD_queue_response(x.http, unsigned(r.status), response);
    MHD_destroy_response(response);
    return result;
  }
  static ssize_t read_stream(void* of, uint64_t, char* into, size_t most) {
    Delivery& d = **static_cast<std::shared_ptr<Delivery>*>(of);
    const std::lock_guard lock(d.mutex);
    if (d.waiting.empty() && d.ended) return MHD_CONTENT_READER_END_OF_STREAM;
    if (d.waiting.empty()) {
      d.sleep();
      return 0;
    }
    const size_t n = std::min(most, d.waiting.size());
    std::memcpy(into, d.waiting.data(), n);
    d.took(n);
    return ssize_t(n);
  }
  static MHD_Result send_stream(Exchange& x) {
    MHD_Response* response = MHD_create_response_from_callback(
        MHD_SIZE_UNKNOWN, 16384, &read_stream, new std::shared_ptr<Delivery>(x.delivery),
        [](void* of) { delete static_cast<std::shared_ptr<Delivery>*>(of); });
    return queue(
        x, response,
        {.type = "text/event-stream", .headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}}});
  }

  // The meant address where a client's base URL lacks /v1 or has it twice, as OpenAI's clients need it and Anthropic's
  // add it.
  static std::string nearby(const std::string& url, const std::map<std::string, Exchange::Kind>& kinds) {
    const auto known = [&](const std::string& u) { return u == "/v1/models" || kinds.count(u) != 0; };
    if (known("/v1" + url)) return ", expected /v1" + url + ": the base URL of OpenAI's clients ends in /v1";
    if (url.starts_with("/v1/v1/") && known(url.substr(3)))
      return ", expected " + url.substr(3) + ": the base URL of Anthropic's clients ends before /v1";
    return "";
  }

  // Answers requests without a body; nothing for requests whose body follows.
  std::optional<Reply> route(Exchange& x, const std::string& url, const std::string& method) {
    const bool get = method == "GET" || method == "HEAD";
    Service* s = service;
    const auto method_must_be = [&](bool right, const char* allowed) {
      if (!right) throw ApiError(405, "found " + method.substr(0, 20) + ", expected " + allowed);
    };
    if (url == "/health" || url == "/") {
      method_must_be(get, "GET");
      if (url == "/") return page_reply();
      const bool ready = s != nullptr && !stopping;
      return Reply{.status = ready ? 200 : 503,
                   .body = ready      ? "{\"status\":\"ok\"}\n"
                           : stopping ? "{\"status\":\"closing\"}\n"
                                      : "{\"status\":\"loading\"}\n"};
    }
    using Kind = Exchange::Kind;
    static const std::map<std::string, Kind> kinds = {{"/v1/completions", Kind::completion},
                                                      {"/v1/chat/completions", Kind::chat},
                                                      {"/v1/responses", Kind::responses},
                                                      {"/v1/messages", Kind::messages},
                                                      {"/v1/messages/count_tokens", Kind::count_tokens},
                                                      {"/tokenize", Kind::tokenize},
                                                      {"/detokenize", Kind::detokenize}};
    const auto kind = kinds.find(url);
    x.post = kind != kinds.end();
    if (x.post) x.kind = kind->second;
    x.of_messages = x.post && (x.kind == Kind::messages || x.kind == Kind::count_tokens);
    x.client = check_key(x.http);
    constexpr std::string_view kOneModel = "/v1/models/";
    const bool one_model = url.starts_with(kOneModel);
    if (!x.post && url != "/v1/models" && !one_model && url != "/metrics")
      throw ApiError(404, "found no such address" + nearby(url, kinds), "", "not_found");
    method_must_be(x.post ? method == "POST" : get, x.post ? "POST" : "GET");
    if (s == nullptr || stopping) throw ApiError(503, s == nullptr ? "the model is loading" : "the server is closing");
    if (url == "/metrics") return Reply{.body = s->metrics_text(), .type = "text/plain; version=0.0.4; charset=utf-8"};
    if (url == "/v1/models") return Reply{.body = s->models_json() + "\n"};
    // A name may have slashes, plain or escaped.
    if (one_model) return Reply{.body = s->model_json(unescaped(url.substr(kOneModel.size())).value_or("")) + "\n"};
    check_body_headers(x);
    if (x.kind < Kind::count_tokens) x.announced = s->announce();
    return {};
  }
  void check_body_headers(Exchange& x) const {
    const char* type = header(x.http, "Content-Type");
    const std::string kind = type == nullptr ? "" : lower(std::string(type).substr(0, std::string(type).find(';')));
    if (kind.substr(0, kind.find_last_not_of(' ') + 1) != "application/json")
      throw ApiError(415, std::string(type == nullptr ? "found no" : "found another") +
                              " Content-Type, expected the header Content-Type: application/json");
    if (const char* coding = header(x.http, "Content-Encoding"); coding != nullptr && lower(coding) != "identity")
      throw ApiError(415, "found a Content-Encoding, expected none");
    const char* length = header(x.http, "Content-Length");
    if (length != nullptr && std::stoull(length) > uint64_t(options.limits.body)) throw too_large();
  }
  ApiError too_large() const {
    return ApiError(413,
                    detail::concat("found a body of more than ", options.limits.body, " bytes, expected at most that"));
  }
  // An allowed origin may send any headers: client libraries add headers of their own, which pages cannot remove.
  static Reply preflight(MHD_Connection* c) {
    const char* asked = header(c, "Access-Control-Request-Headers");
    const bool names = asked != nullptr && *asked != 0 && std::all_of(asked, asked + std::strlen(asked), [](char at) {
                         return is_token_character(at) || at == ',' || at == ' ';
                       });
    Reply r{.status = 204,
            .headers = {{"Access-Control-Allow-Methods", "GET, POST"},
                        {"Access-Control-Allow-Headers", names ? asked : "Authorization, Content-Type"},
                        {"Access-Control-Max-Age", "600"}}};
    // Browsers ask for permission before a page from the internet sends requests to a private network.
    if (header(c, "Access-Control-Request-Private-Network") != nullptr)
      r.headers.emplace_back("Access-Control-Allow-Private-Network", "true");
    return r;
  }

  MHD_Result begin(Exchange& x, const char* url, const char* method_text, const char* version) {
    const std::string method = method_text;
    try {
      check_framing(x.http, url, method_text, version);
      check_size(x.http, url);
    } catch (const ApiError& e) { return send(x, error_reply(x, e, true)); }
    try {
      check_host(x.http);
      x.origin = check_origin(x.http);
      auto reply = method == "OPTIONS" && !x.origin.empty() ? preflight(x.http) : route(x, url, method);
      return reply ? send_soon(x, std::move(*reply)) : MHD_YES;  // the body follows
    } catch (const ApiError& e) {
      return method == "GET" ? send_soon(x, error_reply(x, e)) : send(x, error_reply(x, e, true));
    }
  }
  // A reply sent before a body closes the connection. Without a body the reply is sent in the next call, so that the
  // library keeps the connection open.
  static MHD_Result send_soon(Exchange& x, Reply reply) {
    if (header(x.http, "Content-Length") != nullptr || header(x.http, "Transfer-Encoding") != nullptr)
      return send(x, reply);
    x.reply = std::move(reply);
    return MHD_YES;
  }

  // Answers requests that need only the model's vocabulary.
  std::optional<Reply> answer_at_once(const Exchange& x) const {
    const Service& s = *service.load();
    const ApiLimits& l = options.limits;
    switch (x.kind) {
      case Exchange::Kind::tokenize: return Reply{.body = s.tokenize(parse_tokenize_request(x.body, l)) + "\n"};
      case Exchange::Kind::detokenize: return Reply{.body = s.detokenize(parse_detokenize_request(x.body, l)) + "\n"};
      case Exchange::Kind::count_tokens: return Reply{.body = s.count_tokens(parse_messages_request(x.body, l)) + "\n"};
      default: return {};
    }
  }
  ApiRequest request_of(const Exchange& x) const {
    if (x.kind == Exchange::Kind::responses) return parse_responses_request(x.body, options.limits);
    if (x.kind == Exchange::Kind::messages) return parse_messages_request(x.body, options.limits);
    return parse_api_request(x.body, x.kind == Exchange::Kind::chat, options.limits);
  }

  MHD_Result ask(Exchange& x) {
    const auto announced = std::move(x.announced);  // released as soon as the request is submitted or refused
    try {
      if (x.received > size_t(options.limits.body)) throw too_large();
      if (auto reply = answer_at_once(x)) return send(x, *reply);
      const ApiRequest request = request_of(x);
      x.body = {};
      auto d = std::make_shared<Delivery>();
      d->connection = x.http;
      d->streams = request.stream;
      d->of_messages = x.of_messages;
      d->stall_seconds = options.stall_seconds;
      Service* s = service;
      const auto ticket = s->ask(request, x.client,
                                 {.event = [d](std::string e) { d->push(e); },
                                  .end = [d](int status, const std::string& body) { d->end(status, body); },
                                  .ready = [d] { return d->ready(); }});
      {
        const std::lock_guard lock(mutex);  // the watcher reads both
        x.delivery = d;
        x.ticket = ticket;
      }
    } catch (const ApiError& e) { return send(x, error_reply(x, e)); } catch (const std::exception& e) {
      log_error("request failed: ", e.what());
      return send(x, error_reply(x, ApiError(500, "the request failed; the server's log says why")));
    }
    return x.delivery->streams ? send_stream(x) : deliver(x);
  }
  // Sends the whole answer, or suspends the connection until the answer is complete.
  static MHD_Result deliver(Exchange& x) {
    Delivery& d = *x.delivery;
    const std::lock_guard lock(d.mutex);
    if (!d.ended) {
      d.sleep();
      return MHD_YES;
    }
    return send(x, {.status = d.status, .body = std::exchange(d.waiting, {}) + "\n"});
  }

  // --- callbacks of libmicrohttpd
  static MHD_Result handle(void* self, MHD_Connection* c, const char* url, const char* method, const char* version,
                           const char* data, size_t* size, void** of) {
    Impl& impl = *static_cast<Impl*>(self);
    try {
      auto* x = static_cast<Exchange*>(*of);
      if (x == nullptr) {
        *of = x = new Exchange;
        x->http = c;
        x->connection =
            static_cast<Connection*>(MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context);
        {
          const std::lock_guard lock(impl.mutex);
          x->connection->busy = true;
          impl.exchanges.insert(x);
        }
        return impl.begin(*x, url, method, version);
      }
      if (x->delivery) return deliver(*x);
      if (x->reply) return send(*x, *x->reply);
      if (*size > 0) {
        // No client sends a body in so many pieces; the lengths of the pieces would cost more than the content.
        constexpr int64_t kPieces = 1 << 16;
        if (++x->pieces > kPieces) return MHD_NO;
        x->received += *size;
        // A body beyond the limit is read and dropped, so that the client reads the answer.
        if (x->received <= size_t(impl.options.limits.body)) x->body.append(data, *size);
        *size = 0;
        return MHD_YES;
      }
      return impl.ask(*x);
    } catch (...) { return MHD_NO; }
  }
  // The library must not decode addresses, because check_framing() compares the addresses as they were sent; only the
  // name of a model may contain escapes.
  static size_t as_it_is(void*, MHD_Connection*, char* text) { return std::strlen(text); }
  static void completed(void* self, MHD_Connection*, void** of, MHD_RequestTerminationCode) {
    Impl& impl = *static_cast<Impl*>(self);
    auto* x = static_cast<Exchange*>(*of);
    if (x == nullptr) return;
    *of = nullptr;
    std::shared_ptr<Service::Ticket> ticket;
    {
      const std::lock_guard lock(impl.mutex);
      impl.exchanges.erase(x);
      x->connection->busy = false;
      x->connection->since = Clock::now();
    }
    if (x->delivery) {
      const std::lock_guard lock(x->delivery->mutex);
      x->delivery->connection = nullptr;
      if (!x->delivery->ended) ticket = x->ticket;
    }
    if (ticket) impl.service.load()->cancel(ticket);  // the client has disconnected
    delete x;
  }
  static void connected(void* self, MHD_Connection* c, void** of, MHD_ConnectionNotificationCode what) {
    Impl& impl = *static_cast<Impl*>(self);
    const std::lock_guard lock(impl.mutex);
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
      auto* connection =
          new Connection{.descriptor = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd};
      // Otherwise the system buffers megabytes for a client that does not read.
      const int buffer = 256 << 10;
      ::setsockopt(connection->descriptor, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
      impl.connections.insert(connection);
      *of = connection;
    } else if (auto* connection = static_cast<Connection*>(*of)) {
      impl.connections.erase(connection);
      delete connection;
      *of = nullptr;
    }
  }

  // --- clients that disconnect or take too long
  void watch() {
    while (watching) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::vector<std::shared_ptr<Service::Ticket>> gone;
      {
        const std::lock_guard lock(mutex);
        for (Connection* c : connections)
          if (!c->busy && seconds_since(c->since) > options.header_seconds) ::shutdown(c->descriptor, SHUT_RDWR);
        for (Exchange* x : exchanges) look_at(*x, gone);
      }
      for (const auto& ticket : gone) service.load()->cancel(ticket);
    }
  }
  // The library does not poll suspended connections, so this function looks at the socket itself.
  void look_at(Exchange& x, std::vector<std::shared_ptr<Service::Ticket>>& gone) const {
    if (!x.delivery) {
      if (x.post && seconds_since(x.started) > options.body_seconds) ::shutdown(x.connection->descriptor, SHUT_RDWR);
      return;
    }
    pollfd p{.fd = x.connection->descriptor, .events = POLLRDHUP};
    ::poll(&p, 1, 0);
    Delivery& d = *x.delivery;
    const std::lock_guard lock(d.mutex);
    const bool late = d.behind && seconds_since(d.behind_since) > d.patience;
    x.connection->set_abrupt(late || (d.behind && !d.ended));
    if (late) ::shutdown(x.connection->descriptor, SHUT_RDWR);
    if (d.ended) return;
    const bool broken = (p.revents & (POLLERR | POLLHUP)) != 0;
    const bool closed = (p.revents & POLLRDHUP) != 0;
    if (broken || (closed && !d.streams)) {
      gone.push_back(x.ticket);
    } else if (d.streams && d.asleep && seconds_since(d.latest) > (closed ? 0.1 : 10)) {
      // A client that closed only its sending direction reads this comment; a client that has gone causes an error that
      // the next check finds. During a long prompt the comment shows that the server is alive.
      d.waiting += ": waiting\n\n";
      d.latest = Clock::now();
      d.wake();
    }
  }

  // Reserves a descriptor for each connection at the start: without descriptors libmicrohttpd retries in a busy loop.
  void take_descriptors() const {
    constexpr rlim_t kOthers = 64;
    const rlim_t needed = rlim_t(options.connections) + kOthers;
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur >= needed) return;
    if (limit.rlim_max < needed)
      fail(ErrorCode::usage, "--connections: found ", options.connections, ", but this process may open no more than ",
           limit.rlim_max, " files, of which it keeps ", kOthers);
    limit.rlim_cur = needed;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  void listen() {
    take_descriptors();
    addrinfo hints{.ai_flags = AI_PASSIVE | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM}, *found = nullptr;
    const std::string service_name = std::to_string(options.port);
    if (const int e = getaddrinfo(options.host.c_str(), service_name.c_str(), &hints, &found); e != 0)
      fail(ErrorCode::usage, "--host: found '", options.host,
           "', expected a name or address of this machine: ", gai_strerror(e));
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> holder(found, freeaddrinfo);
    const int s = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    ::setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (s < 0 || ::bind(s, found->ai_addr, found->ai_addrlen) != 0 || ::listen(s, 256) != 0) {
      const int why = errno;
      if (s >= 0) ::close(s);
      fail(why == EADDRINUSE ? ErrorCode::busy : ErrorCode::io, options.host, ":", options.port, ": ",
           std::strerror(why));
    }
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME;
    daemon =
        MHD_start_daemon(flags, 0, nullptr, nullptr, &handle, this, MHD_OPTION_LISTEN_SOCKET, s,
                         MHD_OPTION_THREAD_POOL_SIZE, 4u, MHD_OPTION_UNESCAPE_CALLBACK, &as_it_is, nullptr,
                         MHD_OPTION_NOTIFY_COMPLETED, &completed, this, MHD_OPTION_NOTIFY_CONNECTION, &connected, this,
                         MHD_OPTION_CONNECTION_LIMIT, unsigned(options.connections), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                         size_t(32768), MHD_OPTION_CONNECTION_TIMEOUT, unsigned(std::ceil(options.stall_seconds)),
                         MHD_OPTION_PER_IP_CONNECTION_LIMIT, unsigned(options.connections_of_one),
#if MHD_VERSION >= 0x00097701
                         MHD_OPTION_CLIENT_DISCIPLINE_LVL, 1,
#else
                         MHD_OPTION_STRICT_FOR_CLIENT, 1,
#endif
                         MHD_OPTION_END);
    if (daemon == nullptr) {
      ::close(s);
      fail(ErrorCode::io, options.host, ":", options.port, ": libmicrohttpd could not start");
    }
    listener = s;
    watcher = std::thread([this] { watch(); });
  }
  int port() const {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                               : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  }
  // A round of a large model may take minutes. Its clients get an error, because libmicrohttpd cannot end while
  // connections are suspended.
  static constexpr double kLastRound = 10;  // seconds
  void cut_off_all() {
    std::vector<std::shared_ptr<Delivery>> open;
    {
      const std::lock_guard lock(mutex);
      for (Exchange* x : exchanges)
        if (x->delivery) open.push_back(x->delivery);
    }
    for (const auto& d : open) d->cut_off(ApiError(503, "the answer was cut off: the server is closing"));
  }
  bool stop(double seconds) {
    if (daemon == nullptr) return true;
    stopping = true;
    Service* s = service;
    const bool drained = s == nullptr || s->drain(seconds);
    if (!drained) {
      std::vector<std::shared_ptr<Service::Ticket>> left;
      {
        const std::lock_guard lock(mutex);
        for (Exchange* x : exchanges)
          if (x->ticket) left.push_back(x->ticket);
      }
      for (const auto& ticket : left) s->cancel(ticket);
      if (!s->drain(kLastRound)) cut_off_all();
    }
    // Finished answers are still being sent.
    for (const auto start = Clock::now(); seconds_since(start) < 5;
         std::this_thread::sleep_for(std::chrono::milliseconds(10))) {
      const std::lock_guard lock(mutex);
      if (exchanges.empty()) break;
    }
    watching = false;
    watcher.join();
    MHD_stop_daemon(daemon);
    daemon = nullptr;
    return drained;
  }
};

Server::Server(const ServerOptions& options) : impl_(std::make_unique<Impl>(options)) { impl_->listen(); }
Server::~Server() { impl_->stop(0); }
void Server::serve(Service& service) { impl_->service = &service; }
int Server::port() const { return impl_->port(); }
bool Server::stop(double seconds) { return impl_->stop(seconds); }

}  // namespace ingot::server
