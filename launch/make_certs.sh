#!/usr/bin/env bash
# Certificates for TLS between the parts of a cluster, of an authority of your own (openssl, keys of P-256).
#
#   launch/make_certs.sh ca DIR               make DIR/ca.pem, for everybody (tls.ca and tls.client_ca), and DIR/ca.key
#   launch/make_certs.sh host DIR NAME...     make, or renew, DIR/NAME.pem and DIR/NAME.key (tls.certificate, tls.key), called
#                                             after the first name; further names and IP addresses of the host may follow
#
# DAYS sets the lifetime: by default 3650 days of an authority and 90 of a host, or what is left of the authority's. There is
# no revocation: a new authority ends all certificates of the old one. Running parts use renewed files without a restart.
set -euo pipefail
umask 077
fail() { echo "launch/make_certs.sh: $*" >&2; exit 2; }
kind=${1:-} dir=${2:-}
key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc)
case $kind in
  ca)
    [ -n "$dir" ] || fail 'name a directory'
    if [ -e "$dir/ca.pem" ] || [ -e "$dir/ca.key" ]; then
      fail "$dir/ca.pem or ca.key is there already: a new authority ends every certificate of the old one"
    fi
    mkdir -p "$dir"
    openssl req -x509 "${key[@]}" -keyout "$dir/ca.key" -out "$dir/ca.pem" -days "${DAYS:-3650}" -subj /CN=pdserve \
      -addext basicConstraints=critical,CA:TRUE,pathlen:0 -addext keyUsage=critical,keyCertSign,cRLSign 2> /dev/null ||
      fail "openssl makes no authority in $dir"
    chmod 644 "$dir/ca.pem"
    echo "$dir/ca.pem: give it to all parts as tls.ca, and as tls.client_ca to those that listen" ;;
  host)
    [ $# -ge 3 ] || fail 'name a directory and at least one name of the host'
    [ -e "$dir/ca.key" ] || fail "$dir holds no authority: launch/make_certs.sh ca $dir makes one"
    names=''
    for name in "${@:3}"; do
      if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then kind=IP; else kind=DNS; fi
      [[ $name =~ ^(\*\.)?[A-Za-z0-9:]([A-Za-z0-9.:-]*[A-Za-z0-9])?$ ]] || fail "'$name' is no name of a host and no IP address"
      names+=${names:+,}$kind:$name
    done
    end=$(openssl x509 -in "$dir/ca.pem" -noout -enddate)
    left=$((($(date -d "${end#*=}" +%s) - $(date +%s)) / 86400)) days=${DAYS:-90}
    [ "$left" -gt 0 ] || fail "$dir/ca.pem ends within a day or has ended: make another authority in a new directory"
    stem=$dir/${3//[^A-Za-z0-9.-]/_}
    trap 'rm -f "$stem.key.new" "$stem.pem.new"' EXIT
    openssl req -x509 -CA "$dir/ca.pem" -CAkey "$dir/ca.key" "${key[@]}" -keyout "$stem.key.new" -out "$stem.pem.new" \
      -days $((days < left ? days : left)) -subj "/CN=${3:0:64}" -addext "subjectAltName=$names" \
      -addext basicConstraints=critical,CA:FALSE -addext extendedKeyUsage=serverAuth,clientAuth 2> /dev/null ||
      fail "openssl makes no certificate for $names"
    chmod 644 "$stem.pem.new"
    mv "$stem.key.new" "$stem.key" # the key first: who reads the files meanwhile finds a pair that does not fit, and looks again
    mv "$stem.pem.new" "$stem.pem"
    echo "$stem.pem: tls.certificate of the parts on this host; $stem.key: tls.key, to be read by its owner only" ;;
  *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; [ "$kind" = --help ] || exit 2 ;;
esac
