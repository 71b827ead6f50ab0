//! A store on an etcd cluster, by the JSON form of etcd's API (version 3.4 and later).

mod client;
mod store;

pub(super) use store::EtcdStore;
