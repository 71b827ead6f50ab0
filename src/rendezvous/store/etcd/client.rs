//! Requests to the servers of a cluster.

use std::io::{ErrorKind, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;
use serde_json::{Value, json};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body, http};

use super::super::kv::LARGEST_VALUE;
use super::super::url::EtcdUrl;
use crate::sys;

/// The largest answer: one value in base64, and what is around it.
const LARGEST_ANSWER: u64 = (LARGEST_VALUE as u64).div_ceil(3) * 4 + (64 << 10);

/// The most of a server's message that an error quotes, in bytes.
const LONGEST_MESSAGE: usize = 300;

/// How long one server may take to accept a connection before the next one is asked.
const CONNECTING: Duration = Duration::from_secs(2);

/// Codes of gRPC.
const UNAVAILABLE: i64 = 14;
const UNAUTHENTICATED: i64 = 16;

/// Why a request failed.
#[derive(Debug)]
pub(super) enum Problem {
    /// No server answered, or none could: another attempt may succeed.
    NoAnswer(String),
    /// A server refused the request.
    Refused(String),
    /// The answer is not that of an etcd server.
    Foreign(String),
}

/// One server's answer to one request.
enum Answer {
    Done(Value),
    /// The token that the request carried is not valid, or no longer.
    TokenExpired(String),
    Failed(Problem),
}

pub(super) struct Client {
    agent: Agent,
    scheme: &'static str,
    servers: Vec<String>,
    /// The server that answered last.
    current: AtomicUsize,
    login: Option<(String, String)>,
    token: Mutex<Option<String>>,
}

impl Client {
    pub(super) fn new(url: &EtcdUrl) -> Client {
        let agent = Agent::config_builder()
            // Errors of the server come with a reason in their body.
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECTING))
            .max_redirects(0)
            .max_redirects_will_error(false)
            // A proxy of the environment is one for the web.
            .proxy(None)
            .user_agent("kolo");
        let agent = if url.tls { agent.tls_config(tls()) } else { agent };
        Client {
            agent: agent.build().new_agent(),
            scheme: if url.tls { "https" } else { "http" },
            servers: url.servers.clone(),
            current: AtomicUsize::new(0),
            login: url.login.clone(),
            token: Mutex::new(None),
        }
    }

    /// Sends a request, which may be executed more than once: if a server does not answer, the next
    /// one is asked, and the last one twice because it may have closed a connection that was idle.
    pub(super) fn call(&self, path: &str, request: &Value, timeout: Duration) -> Result<Value, Problem> {
        let deadline = Instant::now() + timeout;
        let mut attempts = self.servers.len() + 1;
        let mut logins = 1;
        loop {
            attempts -= 1;
            let answer = match self.token(deadline) {
                Ok(token) => self.ask(path, request, token.as_deref(), deadline),
                Err(problem) => Answer::Failed(problem),
            };
            let problem = match answer {
                Answer::Done(value) => return Ok(value),
                Answer::TokenExpired(_) if self.login.is_some() && logins > 0 => {
                    logins -= 1;
                    attempts += 1;
                    *self.token.lock() = None;
                    continue;
                }
                Answer::TokenExpired(message) => return Err(Problem::Refused(message)),
                Answer::Failed(problem) => problem,
            };
            if attempts == 0 || Instant::now() >= deadline || !matches!(problem, Problem::NoAnswer(_)) {
                return Err(problem);
            }
            self.current.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until a key may have changed since `revision`, or until the timeout. Returns whether it
    /// may have changed.
    pub(super) fn watch(&self, key: &[u8], revision: i64, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let request = json!({"create_request": {"key": encoded(key), "start_revision": (revision + 1).to_string()}});
        let token = self.token.lock().clone();
        let Ok(response) = self.post("/v3/watch", &request, token.as_deref(), deadline) else { return false };
        if response.status() != 200 {
            return false;
        }
        // The answer is one line that the watch exists, and one for each event. What the events say
        // is read by the next request.
        let mut answer = response.into_body().into_reader();
        let mut bytes = [0; 1 << 10];
        let mut is_there = false;
        for _ in 0..64 {
            let Ok(count @ 1..) = answer.read(&mut bytes) else { return false };
            let rest = match bytes[..count].iter().position(|&byte| byte == b'\n') {
                Some(end) if !is_there => &bytes[end + 1..count],
                None if !is_there => continue,
                _ => &bytes[..count],
            };
            is_there = true;
            if !rest.is_empty() {
                return true;
            }
        }
        false
    }

    /// Returns the token that requests carry, and logs in for it if there is none; `None` without a
    /// user.
    fn token(&self, deadline: Instant) -> Result<Option<String>, Problem> {
        let Some((user, password)) = &self.login else { return Ok(None) };
        let mut token = self.token.lock();
        if token.is_none() {
            let request = json!({"name": user, "password": password});
            match self.ask("/v3/auth/authenticate", &request, None, deadline) {
                Answer::Done(answer) => {
                    let given = answer["token"].as_str();
                    let given = given.ok_or_else(|| Problem::Foreign("it answered a login without a token".to_owned()))?;
                    *token = Some(given.to_owned());
                }
                Answer::TokenExpired(message) => return Err(Problem::Refused(message)),
                Answer::Failed(problem) => return Err(problem),
            }
        }
        Ok(token.clone())
    }

    fn ask(&self, path: &str, request: &Value, token: Option<&str>, deadline: Instant) -> Answer {
        let answered = self.post(path, request, token, deadline).and_then(|mut response| {
            let body = response.body_mut().with_config().limit(LARGEST_ANSWER).read_to_vec()?;
            Ok((response.status(), body))
        });
        match answered {
            Ok((status, body)) => read(status.as_u16(), &body),
            Err(ureq::Error::BodyExceedsLimit(limit)) => {
                Answer::Failed(Problem::Foreign(format!("its answer is longer than {limit} bytes")))
            }
            Err(error) => {
                // A server with TLS closes a connection that does not speak it, or resets it if it has
                // not read the whole request.
                let is_closed = matches!(&error, ureq::Error::Io(error) if is_end(error.kind()));
                let advice = if is_closed && self.scheme == "http" { "; if it speaks TLS, write etcds://" } else { "" };
                Answer::Failed(Problem::NoAnswer(format!("{}: {}{advice}", self.server(), described(error))))
            }
        }
    }

    fn post(
        &self,
        path: &str,
        request: &Value,
        token: Option<&str>,
        deadline: Instant,
    ) -> Result<http::Response<Body>, ureq::Error> {
        // A timeout of zero would be none.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let url = format!("{}://{}{path}", self.scheme, self.server());
        let post = self.agent.post(url).config().timeout_global(Some(left)).build().header("Content-Type", "application/json");
        let post = if let Some(token) = token { post.header("Authorization", token) } else { post };
        sys::above_standard(|| post.send(request.to_string()))
    }

    fn server(&self) -> &str {
        &self.servers[self.current.load(Ordering::Relaxed) % self.servers.len()]
    }
}

/// Returns a key or a value as requests have it.
pub(super) fn encoded(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Returns a value of an answer. etcd leaves out what is empty.
pub(super) fn decoded(value: &Value) -> Result<Vec<u8>, Problem> {
    let text = if value.is_null() { Some("") } else { value.as_str() };
    text.and_then(|text| STANDARD.decode(text).ok())
        .ok_or_else(|| Problem::Foreign("it answered with a value that is not base64".to_owned()))
}

/// Reads a server's answer.
fn read(status: u16, body: &[u8]) -> Answer {
    let parsed = serde_json::from_slice::<Value>(body).ok().filter(Value::is_object);
    if let (200, Some(answer)) = (status, parsed.as_ref()) {
        return Answer::Done(answer.clone());
    }
    let Some(code) = parsed.as_ref().and_then(|answer| answer["code"].as_i64()) else {
        let said = excerpt(&String::from_utf8_lossy(body));
        return Answer::Failed(Problem::Foreign(format!("it answered with status {status} ({said})")));
    };
    let message = parsed.as_ref().and_then(|answer| answer["error"].as_str().or_else(|| answer["message"].as_str()));
    let message = excerpt(message.unwrap_or_default());
    match code {
        UNAUTHENTICATED => Answer::TokenExpired(message),
        UNAVAILABLE => Answer::Failed(Problem::NoAnswer(message)),
        _ => Answer::Failed(Problem::Refused(message)),
    }
}

/// Returns the beginning of what a server said, in one line.
fn excerpt(text: &str) -> String {
    let mut line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST_MESSAGE).collect();
    line.truncate(line.trim_end().len());
    line
}

/// Whether the server has ended the connection, with or without a reset.
fn is_end(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe)
}

fn described(error: ureq::Error) -> String {
    match error {
        ureq::Error::Timeout(_) => "no answer in time".to_owned(),
        ureq::Error::Io(error) => error.to_string(),
        error => error.to_string(),
    }
}

/// The certificates of the system's authorities, or of the file `SSL_CERT_FILE`.
fn tls() -> TlsConfig {
    let authorities = rustls_native_certs::load_native_certs().certs;
    let authorities = authorities.iter().map(|authority| Certificate::from_der(authority).to_owned()).collect();
    TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(authorities)))
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build()
}
