#include "ingot/apps/server/page.h"

#include <cstdio>
#include <random>
#include <string>

namespace ingot::server {
namespace {

// The page. @NONCE@ marks the places of the nonce by which the content security policy allows the page's own script and
// style.
const std::string kPage =
#include <ingot_page.inc>
    ;

std::string nonce() {
  std::random_device device;
  char text[33];
  std::snprintf(text, sizeof text, "%08x%08x%08x%08x", device(), device(), device(), device());
  return text;
}

}  // namespace

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

}  // namespace ingot::server
