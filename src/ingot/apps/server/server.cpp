#include "ingot/apps/server/server.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netdb.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "ingot/apps/server/access.h"
#include "ingot/apps/server/exchange.h"
#include "ingot/apps/server/page.h"
#include "ingot/apps/server/request_header.h"
#include "ingot/apps/server/routes.h"
#include "ingot/apps/server/sending.h"
#include "ingot/apps/server/watcher.h"
#include "ingot/core/clock.h"
#include "ingot/core/log.h"

namespace ingot::server {

struct Server::Impl {
  const ServerOptions options;
  const Access access;
  MHD_Daemon* daemon = nullptr;
  int listener = -1;  // closed by the daemon
  std::atomic<Service*> service = nullptr;
  std::atomic<bool> stopping = false;
  Watcher watcher;

  explicit Impl(const ServerOptions& o)
      : options(o), access(o), watcher(o.header_seconds, o.body_seconds, [this](const Watcher::Ticket& ticket) {
          service.load()->cancel(ticket);
        }) {}

  // --- the header of a request

  MHD_Result begin(Exchange& x, const char* url, const char* method_text, const char* version) {
    const std::string method = method_text;
    try {
      check_framing(x.http, url, method_text, version);
      check_size(x.http, url);
    } catch (const ApiError& e) { return send(x, error_reply(x, e, true)); }
    try {
      access.check_host(x.http);
      x.origin = access.check_origin(x.http);
      auto reply = method == "OPTIONS" && !x.origin.empty() ? preflight(x.http) : route(x, url, method);
      return reply ? send_soon(x, std::move(*reply)) : MHD_YES;  // the body follows
    } catch (const ApiError& e) {
      return method == "GET" ? send_soon(x, error_reply(x, e)) : send(x, error_reply(x, e, true));
    }
  }
  // Answers requests without a body. Returns nothing for a request whose body follows.
  std::optional<Reply> route(Exchange& x, const std::string& url, const std::string& method) {
    const bool get = method == "GET" || method == "HEAD";
    Service* s = service;
    if (url == "/health" || url == "/") {
      check_method(method, get, "GET");
      return url == "/" ? page_reply() : health_reply();
    }
    const auto kind = body_kind(url);
    x.post = kind.has_value();
    if (kind) x.kind = *kind;
    x.of_messages = kind == Exchange::Kind::messages || kind == Exchange::Kind::count_tokens;
    x.client = access.check_key(x.http);
    const bool one_model = url.starts_with(kOneModel);
    if (!kind && url != "/v1/models" && !one_model && url != "/metrics")
      throw ApiError(404, "found no such address, expected " + nearby(url), "", "not_found");
    check_method(method, kind ? method == "POST" : get, kind ? "POST" : "GET");
    if (s == nullptr || stopping) throw ApiError(503, s == nullptr ? "the model is loading" : "the server is closing");
    if (url == "/metrics") return Reply{.body = s->metrics_text(), .type = "text/plain; version=0.0.4; charset=utf-8"};
    if (url == "/v1/models") return Reply{.body = s->models_json() + "\n"};
    // A name may have slashes, plain or escaped.
    if (one_model) return Reply{.body = s->model_json(unescaped(url.substr(kOneModel.size())).value_or("")) + "\n"};
    check_body_headers(x.http, options.limits);
    if (x.wants_answer()) x.announced = s->announce();
    return {};
  }
  Reply health_reply() const {
    const bool ready = service != nullptr && !stopping;
    return {.status = ready ? 200 : 503,
            .body = ready      ? "{\"status\":\"ok\"}\n"
                    : stopping ? "{\"status\":\"closing\"}\n"
                               : "{\"status\":\"loading\"}\n"};
  }

  // --- the body of a request

  MHD_Result receive(Exchange& x, const char* data, size_t size) const {
    // No client sends a body in so many pieces; the lengths of the pieces would cost more than the content.
    constexpr int64_t kPieces = 1 << 16;
    if (++x.pieces > kPieces) return MHD_NO;
    x.received += size;
    // A body beyond the limit is read and dropped, so that the client reads the answer.
    if (x.received <= size_t(options.limits.body)) x.body.append(data, size);
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
      if (x.received > size_t(options.limits.body)) throw too_large(options.limits);
      if (auto reply = answer_at_once(x)) return send(x, *reply);
      submit(x);
    } catch (const ApiError& e) { return send(x, error_reply(x, e)); } catch (const std::exception& e) {
      log_error("request failed: ", e.what());
      return send(x, error_reply(x, ApiError(500, "the request failed; the server's log says why")));
    }
    return x.delivery->streams ? send_stream(x) : send_when_complete(x);
  }
  void submit(Exchange& x) {
    const ApiRequest request = request_of(x);
    x.body = {};
    auto d = std::make_shared<Delivery>();
    d->connection = x.http;
    d->streams = request.stream;
    d->of_messages = x.of_messages;
    d->stall_seconds = options.stall_seconds;
    auto ticket = service.load()->ask(request, x.client,
                                      {.event = [d](std::string e) { d->push(e); },
                                       .end = [d](int status, const std::string& body) { d->end(status, body); },
                                       .ready = [d] { return d->ready(); }});
    watcher.answering(x, std::move(d), std::move(ticket));
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
        impl.watcher.began(x);
        return impl.begin(*x, url, method, version);
      }
      if (x->delivery) return send_when_complete(*x);
      if (x->reply) return send(*x, *x->reply);
      if (*size > 0) return impl.receive(*x, data, std::exchange(*size, 0));
      return impl.ask(*x);
    } catch (...) { return MHD_NO; }
  }
  // The library must not decode addresses, because check_framing() compares the addresses as they were sent; only the
  // name of a model may contain escapes.
  static size_t keep_escapes(void*, MHD_Connection*, char* text) { return std::strlen(text); }
  static void completed(void* self, MHD_Connection*, void** of, MHD_RequestTerminationCode) {
    Impl& impl = *static_cast<Impl*>(self);
    auto* x = static_cast<Exchange*>(*of);
    if (x == nullptr) return;
    *of = nullptr;
    std::shared_ptr<Service::Ticket> ticket;
    impl.watcher.ended(x);
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
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
      auto* connection =
          new Connection{.descriptor = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd};
      // Otherwise the system buffers megabytes for a client that does not read.
      const int buffer = 256 << 10;
      ::setsockopt(connection->descriptor, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
      impl.watcher.connected(connection);
      *of = connection;
    } else if (auto* connection = static_cast<Connection*>(*of)) {
      impl.watcher.disconnected(connection);
      delete connection;
      *of = nullptr;
    }
  }

  // --- start and end

  // Permits a descriptor for each connection at the start: without descriptors libmicrohttpd retries in a busy loop.
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
  // A socket that listens at the options' address.
  int open_listener() const {
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
    return s;
  }
  void listen() {
    take_descriptors();
    const int s = open_listener();
    const unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME;
    daemon =
        MHD_start_daemon(flags, 0, nullptr, nullptr, &handle, this, MHD_OPTION_LISTEN_SOCKET, s,
                         MHD_OPTION_THREAD_POOL_SIZE, 4u, MHD_OPTION_UNESCAPE_CALLBACK, &keep_escapes, nullptr,
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
    watcher.start();
  }
  int port() const {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                               : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  }
  bool stop(double seconds) {
    if (daemon == nullptr) return true;
    stopping = true;
    Service* s = service;
    const bool drained = s == nullptr || s->drain(seconds);
    if (!drained) {
      for (const auto& ticket : watcher.tickets()) s->cancel(ticket);
      // A round of a large model may take minutes. Its clients get an error, because libmicrohttpd cannot end while
      // connections are suspended.
      constexpr double kLastRound = 10;  // seconds
      if (!s->drain(kLastRound))
        for (const auto& d : watcher.deliveries())
          d->cut_off(ApiError(503, "the answer was cut off: the server is closing"));
    }
    // Finished answers are still being sent.
    for (const auto start = Clock::now(); seconds_since(start) < 5 && !watcher.idle();)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    watcher.stop();
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
