/* sources 1224be5edc69d7803a38e6d4ea11cf42ae6a338203feb816bf2a9ec9f864e363 */
/* with preact (MIT) and htm (Apache-2.0), whose licences stand in bundle/LICENSES.txt */
var C,vt,kr,Q,We,ze,wt,Ee,yt,Ve,Ge,Mr,ge=Symbol.for("pv"),Te={},Pe=[],Ar=/^m(i|n|o|s|text|space)$/,Ke=Array.isArray,Je=Pe.slice,ne=Object.assign;function re(t){t&&t.parentNode&&t.remove()}function Xe(t,e,r){var n,a,o,s={},i=arguments.length;for(o in e)o=="key"?n=e[o]:o=="ref"&&typeof t!="function"?a=e[o]:s[o]=e[o];return i>2&&(s.children=i>3?Je.call(arguments,2):r),_e(t,s,n,a,null)}function _e(t,e,r,n,a){var o={type:t,props:e,key:r,ref:n,__k:null,__:null,__b:0,__e:null,__c:null,constructor:ge,__v:a||++vt,__i:-1,__u:0};return!a&&C.vnode&&C.vnode(o),o}function Ne(t){return t.children}function xe(t,e){this.props=t,this.context=e,this.__g=0}function ee(t,e){if(e==null)return t.__&&ee(t.__,t.__i+1);for(var r;e<t.__k.length;e++)if((r=t.__k[e])&&r.__e)return r.__e;return typeof t.type!="function"||t.props.__P?null:ee(t)}function Sr(t){var e,r=t.__v,n=r.__e,a=[],o=[],s=t.__P;s&&((e=ne({constructor:ge},r)).__v=r.__v+1,C.vnode&&C.vnode(e),Ye(s,e,r,t.__n,s.namespaceURI,32&r.__u?[n]:null,a,n||ee(r),32&r.__u,o),e.__v=r.__v,e.__.__k[e.__i]=e,Et(a,e,o),r.__=r.__e=null,e.__e!=n&&kt(e))}function kt(t){if((t=t.__)&&t.__c&&!t.props.__P)return t.__e=null,t.__k.some(function(e){return e&&(t.__e=e.__e)}),kt(t)}function bt(t){(8&t.__g||(t.__g|=8,Q.push(t),ze++))&&We==C.debounceRendering||((We=C.debounceRendering)||queueMicrotask)(Mt)}function Mt(){try{for(var t,e=1;Q.length;)Q.length>e&&Q.sort(wt),t=Q.shift(),e=Q.length,8&t.__g&&Sr(t)}finally{(ze=Q.length)&&(We||queueMicrotask)(Mt)}}function At(t,e,r,n,a,o,s,i,l,d,c){var h,f,p,u,$,g,x=n.__k||Pe,m=e.length;for(l=Cr(r,e,x,l,m),h=0;h<m;h++)(p=r.__k[h])!=null&&(f=~p.__i&&x[p.__i]||Te,p.__i=h,g=Ye(t,p,f,a,o,s,i,l,d,c),u=p.__e,(f.ref!=p.ref||8&f.__u)&&(f.ref&&Ze(f.ref,null,p,f),p.ref&&c.push(p.ref,p.__c||u,p)),$=$||u,4&p.__u?(l=St(p,l,t,!f.__v),f.__e&&(f.__e=null)):typeof p.type=="function"&&g!==void 0?l=g:u&&(l=u.nextSibling),p.__u&=-21);return r.__e=$,l}function Cr(t,e,r,n,a){var o,s,i,l,d,c,h,f,p,u=r.length,$=u,g=0,x=0,m=t.__k=Array(a);for(o=0;o<a;o++)(s=e[o])!=null&&typeof s!="boolean"&&typeof s!="function"?(typeof s!="object"||s.constructor===String?s=m[o]=_e(null,s):Ke(s)?s=m[o]=_e(Ne,{children:s}):s.constructor===ge&&s.__b?s=m[o]=_e(s.type,s.props,s.key,s.ref,s.__v):m[o]=s,l=o+g,s.__=t,s.__b=t.__b+1,i=null,~(d=s.__i=Er(s,r,l,$))&&($--,(i=r[d])&&(i.__u|=2)),i&&i.__v?(s.__u|=16,d==l-1?g--:d==l+1?g++:d!=l&&(d>l?g--:g++,x=1)):(~d||(a>u?g--:a<u&&g++),typeof s.type!="function"&&(s.__u|=4))):m[o]=null;if(x){for(c=[],h=[],o=0;o<a;o++)if((s=m[o])&&16&s.__u){for(g=0,f=c.length;g<f;)c[p=g+f>>1]<s.__i?g=p+1:f=p;c[g]=s.__i,h[o]=g+1}for(g=c.length;o--;)h[o]&&(h[o]==g?g--:m[o].__u|=4)}if($)for(o=0;o<u;o++)!(i=r[o])||2&i.__u||(i.__e==n&&(n=ee(i)),Qe(i,i));return n}function St(t,e,r,n){var a,o,s,i;if(typeof t.type=="function"){if(t.props.__P)return e;if(a=t.__k)for(o=0;o<a.length;o++)a[o]&&(a[o].__=t,e=St(a[o],e,r,!1));return e}for(e&&!e.parentNode&&(e=ee(t))&&!e.parentNode&&(e=null),s=t.__e,i=e;i&&i.nodeType==8;)i=i.nextSibling;for(s!=i&&(!n&&r.moveBefore&&s.parentNode?r.moveBefore(s,e):r.insertBefore(s,e||null)),e=s;(e=e&&e.nextSibling)&&e.nodeType==8&&!e.data.startsWith("$s"););return e}function Er(t,e,r,n){var a,o=t.key,s=t.type,i=e[r],l=i&&!(2&i.__u);if(i===null&&o==null||l&&o==i.key&&s==i.type)return r;if(n>(l?1:0)){for(a=r-1;a>=0;a--)if((i=e[a])&&!(2&i.__u)&&o==i.key&&s==i.type)return a;for(a=r+1;a<e.length;a++)if((i=e[a])&&!(2&i.__u)&&o==i.key&&s==i.type)return a}return-1}function $t(t,e,r){r==null&&(r=""),e[0]=="-"?t.setProperty(e,r):t[e]=r}function Ce(t,e,r,n,a){var o,s;if(e=="style")if(typeof r=="string")t.style.cssText=r;else{if(typeof n=="string"&&(t.style.cssText=n=""),n)for(e in n)r&&e in r||$t(t.style,e);if(r)for(e in r)n&&r[e]==n[e]||$t(t.style,e,r[e])}else if(e[0]=="o"&&e[1]=="n")typeof r!="function"&&(r=null),typeof n!="function"&&(n=null),(t.__e||(t.__e={}))[e]=r,r&&n||(s=Ge[e]||(Ge[e]=Or(e)),(t.__a||(t.__a={}))[e]=Ve,o=e!=(e=e.replace(yt,"$1")),(e=e.slice(2))[0]<"a"&&(e=e.toLowerCase()),r?t.addEventListener(e,s,o):t.removeEventListener(e,s,o));else{if(a=="http://www.w3.org/2000/svg")e=e.replace(/xlink(H|:h)/,"h").replace(/sName$/,"s");else if(e!="width"&&e!="height"&&e!="href"&&e!="list"&&e!="form"&&e!="tabIndex"&&e!="download"&&e!="rowSpan"&&e!="colSpan"&&e!="role"&&e!="popover"&&e in t)try{return void(t[e]=r??"")}catch{}if(typeof r=="function")return;r==null||r===!1&&e[4]!="-"?t.removeAttribute(e):t.setAttribute(e,e=="popover"&&r==1?"":r)}}function Or(t){return function(e){var r=this.__e;if(r){if(r=r[t],e[Ee]==null)e[Ee]=Ve++;else if(e[Ee]<this.__a[t])return;return r(C.event?C.event(e):e)}}}function Ye(t,e,r,n,a,o,s,i,l,d){var c,h,f,p,u,$,g,x,m,_,v,w,k,E,A,D,L,R,j=e.type;if(e.constructor!==ge)return null;128&r.__u&&(l=32&r.__u,c=r.__c.__z)&&(e.__u|=l,h=o=[],c.nodeType==8?i=Oe(c,o):o.push(c),i=o[0]||i),(c=C.__b)&&c(e);e:if(typeof j=="function"){f=s.length;try{if(x=e.props,m=(c=j.prototype)&&c.render,_=(c=j.contextType)&&n[c.__c],v=c?_?_.props.value:c.__:n,(p=r.__c)?(e.__c=p,2&p.__g&&(p.__g|=1)):(m?e.__c=p=new j(x,v):(e.__c=p=new xe(x,v),p.constructor=j,p.render=Tr),_&&_.sub(p),p.state||(p.state={}),p.__n=n,p.__g|=8,p.__h=[],p.__k=[]),m&&(p.__s||(p.__s=p.state),j.getDerivedStateFromProps&&(p.__s==p.state&&(p.__s=ne({},p.__s)),ne(p.__s,j.getDerivedStateFromProps(x,p.__s)))),u=p.props,$=p.state,p.__v=e,r.__c){if(x!==u&&m&&!j.getDerivedStateFromProps&&p.componentWillReceiveProps&&p.componentWillReceiveProps(x,v),e.__v==r.__v&&!(8&p.__g)||!(4&p.__g)&&p.shouldComponentUpdate&&p.shouldComponentUpdate(x,p.__s,v)===!1){e.__v!=r.__v&&(p.props=x,p.state=p.__s,p.__g&=-9),e.__e=r.__e,e.__k=r.__k,e.__k.some(function(O){O&&(O.__=e)}),Pe.push.apply(p.__h,p.__k),p.__k=[],p.__h.length&&s.push(p),i=ee(r);break e}p.componentWillUpdate&&p.componentWillUpdate(x,p.__s,v),m&&p.componentDidUpdate&&p.__h.push(function(){p.componentDidUpdate(u,$,g)})}else m&&!j.getDerivedStateFromProps&&p.componentWillMount&&p.componentWillMount(),m&&p.componentDidMount&&p.__h.push(p.componentDidMount);p.context=v,p.props=x,p.__P=t,p.__g&=-5,w=C.__r,k=m?25:0;do p.__g&=-9,w&&w(e),c=p.render(p.props,p.state=p.__s,p.context);while(8&p.__g&&++k<25);m&&(Pe.push.apply(p.__h,p.__k),p.__k=[]),p.state=p.__s,p.getChildContext&&(n=ne({},n,p.getChildContext())),m&&r.__c&&p.getSnapshotBeforeUpdate&&(g=p.getSnapshotBeforeUpdate(u,$)),E=c&&c.type===Ne&&c.key==null?c.props.children:c,x.__P&&(c=i,a=(t=x.__P).namespaceURI,l=o=null,r.props&&r.props.__P!=t&&(r.__k.some(function(O){O&&Qe(O,O)}),r.__k=null),i=r.__k?ee(r,0):null),i=At(t,Ke(E)?E:[E],e,r,n,a,o,s,i,l,d),x.__P&&(e.__e=null,i=c),e.__u&=-161,h&&h.some(re),p.__h.length&&s.push(p),1&p.__g&&(p.__g&=-4)}catch(O){if(s.length=f,e.__v=null,l||o)if(O&&O.then){if(e.__u|=128|l,o){for(~(L=o.indexOf(i||void 0))||(L=o.length);(R=o[L-1])&&R.nodeType==8;)L--;for(;L<o.length;L++)if(R=o[L])if(o[L]=null,A){if(R==D)break}else{if(R.nodeType!=8)break;R.data.startsWith("$s")&&(D=Oe(A=R))}}if(!A){for(;i&&i.nodeType==8&&i.nextSibling;)i=i.nextSibling;A=i}(c=Oe(A=e.__c.__z||(e.__c.__z=A)))?(e.__e=A,i=c):e.__e=i,i=i&&i.nextSibling}else o&&o.some(re);else e.__e=r.__e;e.__k||(e.__k=r.__k||[]),O&&O.then||Ct(e),C.__e(O,e,r)}}else i=e.__e=zr(r.__e,e,r,n,a,o,s,l,d,t);return(c=C.diffed)&&c(e),i}function Oe(t,e){if(t&&t.nodeType==8&&t.data.startsWith("$s"))for(var r=1;t=t.nextSibling;){if(t.nodeType==8){if(t.data.startsWith("$s"))r++;else if(t.data.startsWith("/$s")&&!--r)return t}e&&e.push(t)}}function Ct(t){t&&(t.__c&&(t.__c.__g|=4),t.__k&&t.__k.some(Ct))}function Et(t,e,r){for(var n=0;n<r.length;)Ze(r[n++],r[n++],r[n++]);C.__c&&C.__c(e,t),t.some(function(a){try{t=a.__h,a.__h=[],t.some(function(o){o.call(a)})}catch(o){C.__e(o,a.__v)}})}function zr(t,e,r,n,a,o,s,i,l,d){var c,h,f,p,u,$,g,x,m=r.props||Te,_=e.props,v=e.type;if(v=="svg"?a="http://www.w3.org/2000/svg":v=="math"?a="http://www.w3.org/1998/Math/MathML":a||(a="http://www.w3.org/1999/xhtml"),o){for(c=0;c<o.length;c++)if((u=o[c])&&(v?u.localName==v:u.nodeType==3)){t=u,o[c]=null;break}}if(!t){if(x=d.ownerDocument||document,!v)return x.createTextNode(_);t=x.createElementNS(a,v,_.is?_:d),i&&(C.__m&&C.__m(e,o),i=!1),o=null}if(v){if(d=v=="template"&&t.content||t,o=v=="textarea"&&_.defaultValue!=null?null:o&&Je.call(d.childNodes),!i&&o)for(m={},c=0;c<t.attributes.length;c++)m[(u=t.attributes[c]).name]=u.value;for(c in m)u=m[c],c=="dangerouslySetInnerHTML"?f=u:c=="children"||c in _||c=="value"&&"defaultValue"in _||c=="checked"&&"defaultChecked"in _||Ce(t,c,null,u,a);for(c in _)u=_[c],c=="children"?p=u:c=="dangerouslySetInnerHTML"?h=u:c=="value"?$=u:c=="checked"?g=u:i&&typeof u!="function"||m[c]===u||Ce(t,c,u,m[c],a);h?(i||f&&(h.__html==f.__html||h.__html==t.innerHTML)||(t.innerHTML=h.__html),e.__k=[]):(f&&(t.textContent=""),(v=="foreignObject"||a=="http://www.w3.org/1998/Math/MathML"&&Ar.test(v))&&(a="http://www.w3.org/1999/xhtml"),At(d,Ke(p)?p:[p],e,r,n,a,o,s,o?o[0]:r.__k&&ee(r,0),i,l),o&&o.some(re)),i&&v!="textarea"||(c="value",v=="progress"&&$==null?t.removeAttribute(c):$==null||$===t[c]&&(v!="progress"||$)||Ce(t,c,$,m[c],a),c="checked",g!=null&&g!=t[c]&&Ce(t,c,g,m[c],a))}else m===_||i&&t.data==_||(t.data=_);return t}function Ze(t,e,r,n){try{typeof t=="function"?e?e.__x=t(e)||1:n&&(n=n.__c||n.__e)&&(e=n.__x)&&(n.__x=null,typeof e=="function"?e():t(null)):t.current=e}catch(a){C.__e(a,r)}}function Qe(t,e,r){var n,a,o,s;if(C.unmount&&C.unmount(t),!(n=t.ref)||n.current&&n.current!=t.__e||Ze(n,null,e,t),n=t.__c){if(n.componentWillUnmount)try{n.componentWillUnmount()}catch(i){C.__e(i,e)}n.__P=n.__n=null}if(n=t.__k)for(s=0;s<n.length;s++)n[s]&&Qe(n[s],e,typeof t.type!="function"||r&&!t.props.__P);!r&&(n=t.__c)&&(n=n.__z)&&(a=Oe(n,o=[]))&&(n==t.__e&&o.some(re),re(a),re(n)),r||re(t.__e),t.__e=t.__c=t.__=null}function Tr(t,e,r){return this.constructor(t,r)}function qe(t,e){var r,n,a,o;C.__&&C.__(t,e),e.nodeType==9&&(e=e.documentElement),n=(r=t&&32&t.__u)?null:e.__k,e.__k=_e(Ne,{children:[t]}),a=[],o=[],Ye(e,e.__k,n||Te,Te,e.namespaceURI,n?null:e.firstChild?Je.call(e.childNodes):null,a,n?n.__e:e.firstChild,r,o),Et(a,e.__k,o),e.__k.props.children=null}C={__e:function(t,e,r,n){for(var a,o,s;e=e.__;)if((a=e.__c)&&!(1&a.__g)){a.__g|=4;try{if((s=(o=a.constructor)&&o.getDerivedStateFromError)&&a.setState(o.getDerivedStateFromError(t)),a.componentDidCatch&&(a.componentDidCatch(t,n||{}),s=1),s&&8&a.__g)return void(a.__g|=2)}catch(i){t=i}}throw ze=0,t}},vt=0,kr=function(t){return t!=null&&t.constructor===ge},xe.prototype.setState=function(t,e){var r=this.__s;r&&r!=this.state||(r=this.__s=ne({},this.state)),typeof t=="function"&&(t=t(ne({},r),this.props)),t&&(ne(r,t),this.__v&&(e&&this.__k.push(e),bt(this)))},xe.prototype.forceUpdate=function(t){this.__v&&(this.__g|=4,t&&this.__h.push(t),bt(this))},xe.prototype.render=Ne,Q=[],ze=0,wt=function(t,e){return t.__v.__b-e.__v.__b},Ee=Symbol(),yt=/(PointerCapture)$|Capture$/i,Ve=0,Ge={},Mr=0;var zt=function(t,e,r,n){var a;e[0]=0;for(var o=1;o<e.length;o++){var s=e[o++],i=e[o]?(e[0]|=s?1:2,r[e[o++]]):e[++o];s===3?n[0]=i:s===4?n[1]=Object.assign(n[1]||{},i):s===5?(n[1]=n[1]||{})[e[++o]]=i:s===6?n[1][e[++o]]+=i+"":s?(a=t.apply(i,zt(t,i,r,["",null])),n.push(a),i[0]?e[0]|=2:(e[o-2]=0,e[o]=a)):n.push(i)}return n},Ot=new Map;function Tt(t){var e=Ot.get(this);return e||(e=new Map,Ot.set(this,e)),(e=zt(this,e.get(t)||(e.set(t,e=(function(r){for(var n,a,o=1,s="",i="",l=[0],d=function(f){o===1&&(f||(s=s.replace(/^\s*\n\s*|\s*\n\s*$/g,"")))?l.push(0,f,s):o===3&&(f||s)?(l.push(3,f,s),o=2):o===2&&s==="..."&&f?l.push(4,f,0):o===2&&s&&!f?l.push(5,0,!0,s):o>=5&&((s||!f&&o===5)&&(l.push(o,0,s,a),o=6),f&&(l.push(o,f,0,a),o=6)),s=""},c=0;c<r.length;c++){c&&(o===1&&d(),d(c));for(var h=0;h<r[c].length;h++)n=r[c][h],o===1?n==="<"?(d(),l=[l],o=3):s+=n:o===4?s==="--"&&n===">"?(o=1,s=""):s=n+s[0]:i?n===i?i="":s+=n:n==='"'||n==="'"?i=n:n===">"?(d(),o=1):o&&(n==="="?(o=5,a=s,s=""):n==="/"&&(o<5||r[c][h+1]===">")?(d(),o===3&&(l=l[0]),o=l,(l=l[0]).push(2,0,o),o=0):n===" "||n==="	"||n===`
`||n==="\r"?(d(),o=2):s+=n),o===3&&s==="!--"&&(o=4,l=l[0])}return d(),l})(t)),e),arguments,[])).length>1?e:e[0]}var b=Tt.bind(Xe);var $e,T,et,Pt,tt=Object.is,ve=0,Ut=[],rt=[],z=C,Nt=z.__b,qt=z.__r,Lt=z.diffed,Rt=z.__c,jt=z.unmount,Ht=z.__;function ot(t,e){z.__h&&z.__h(T,t,ve||e),ve=0;var r=T.__H||(T.__H={__:[],__h:[]});return t>=r.__.length&&r.__.push({}),r.__[t]}function U(t){return ve=1,Pr(Wt,t)}function Pr(t,e,r){var n=ot($e++,2);if(n.t=t,!n.__c&&(n.__=[r?r(e):Wt(void 0,e),function(o){var s=(n.__N||n.__)[0],i=n.t(s,o);tt(s,i)||(n.__N=[i,n.__[1]],n.__c.setState({}))}],n.__c=T,!T.__f)){T.__f=!0;var a=T.shouldComponentUpdate;T.shouldComponentUpdate=function(o,s,i){var l=this.__H;if(!l)return!0;var d=!1,c=this.props!=o;if(l.__.some(function(f){f.__N&&(d=!0,tt(f.__[0],f.__N[0])||(c=!0))}),a){var h=a.call(this,o,s,i);return d?h||c:h}return!d||c}}return n.__}function P(t,e){var r=ot($e++,3);!z.__s&&Ft(r.__H,e)&&(r.__P=!0,r.__=t,r.u=e,T.__H.__h.push(r))}function N(t){return ve=5,J(function(){return{current:t}},[])}function J(t,e){var r=ot($e++,7);return Ft(r.__H,e)&&(r.__=t(),r.__H=e),r.__}function Bt(t,e){return ve=8,J(function(){return t},e)}function Nr(){var t;do{for(;t=rt.shift();)try{be(t)}catch(r){z.__e(r,{__:(t=t.__P)&&t.__v})}for(;t=Ut.shift();){var e=t.__H;if(t.__P&&e)try{e.__h.some(be),e.__h.some(nt),e.__h=[]}catch(r){e.__h=[],z.__e(r,t.__v)}}}while(rt.length)}z.__b=function(t){T=null,Nt&&Nt(t)},z.__=function(t,e){t&&e.__k&&e.__k.__m&&(t.__m=e.__k.__m),Ht&&Ht(t,e)},z.__r=function(t){qt&&qt(t),$e=0;var e=(T=t.__c).__H;e&&(et==T?T.__h=[]:(e.__h.some(be),e.__h.some(nt),$e=0),e.__h=[],e.__.some(function(r){r.__N&&(r.__=r.__N),r.u=r.__N=void 0})),et=T},z.diffed=function(t){Lt&&Lt(t);var e=t.__c;e&&e.__H&&(e.__H.__h.length&&Dt(Ut.push(e)),e.__H.__.some(function(r){r.u&&(r.__H=r.u)})),et=T=null},z.__c=function(t,e){e.some(function(r){try{r.__h.some(be),r.__h=r.__h.filter(function(n){return!n.__||nt(n)})}catch(n){r.__h=[function(){throw n}]}}),Rt&&Rt(t,e)},z.unmount=function(t){jt&&jt(t);var e,r,n=t.__c;n&&n.__H&&(n.__H.__.some(function(a){try{if(a.__P&&a.__c){if(r===void 0){for(r=t.__;r&&(!r.__c||!r.__c.__P);)r=r.__;r=r&&r.__c}a.__P=r,Dt(rt.push(a))}else be(a)}catch(o){e=o}}),n.__H=void 0,e&&z.__e(e,n.__v))};var It=typeof requestAnimationFrame=="function";function qr(t){var e,r=function(){clearTimeout(n),It&&cancelAnimationFrame(e),setTimeout(t)},n=setTimeout(r,35);It&&(e=requestAnimationFrame(r))}function Dt(t){t!=1&&Pt==z.requestAnimationFrame||((Pt=z.requestAnimationFrame)||qr)(Nr)}function be(t){var e=T,r=t.__c;typeof r=="function"&&(t.__c=void 0,r()),T=e}function nt(t){var e=T;t.__c=t.__(),T=e}function Ft(t,e){return!t||t.length!=e.length||e.some(function(r,n){return!tt(r,t[n])})}function Wt(t,e){return typeof e=="function"?e(t):e}var Lr={light:{positive:[[250,249,246],[196,221,240],[104,168,214],[23,102,166],[5,48,97]],negative:[[250,249,246],[253,219,179],[244,164,86],[201,98,11],[115,46,4]]},dark:{positive:[[22,24,29],[20,58,92],[32,106,164],[92,172,231],[205,233,255]],negative:[[22,24,29],[84,45,12],[156,84,17],[235,144,60],[255,225,189]]}};function Gt(t){let e=new Uint8ClampedArray(1533);for(let r=0;r<511;r++){let n=Lr[t][r<255?"negative":"positive"],a=Math.abs(r-255)/255*(n.length-1),o=Math.min(Math.floor(a),n.length-2);for(let s=0;s<3;s++){let[i,l]=[n[o][s],n[o+1][s]];e[3*r+s]=i+(l-i)*(a-o)}}return e}var at={light:Gt("light"),dark:Gt("dark")};function st(){let{jpThemeLight:t}=document.body.dataset;if(t!==void 0)return t==="true"?"light":"dark";for(let e of["light","dark"])if(document.body.classList.contains(`${e}-theme`))return e;return matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light"}var Le=(t,e)=>255+Math.round(255*Math.sign(t)*Math.sqrt(Math.min(1,Math.abs(t)/e))),le=t=>at[t];function Vt(t,e,r){let n=3*Le(t,e),[a,o,s]=at[r].subarray(n,n+3);return`rgb(${a} ${o} ${s})`}function Kt(t,e,r){let n=3*Le(t,e),[a,o,s]=at[r].subarray(n,n+3);return .299*a+.587*o+.114*s>140?"#14161a":"#ffffff"}var Y={left:[],right:[]},Xt={text:"",added:Y,answer:null,lambdas:{all:null,layers:{},heads:{}},left:{layer:1,head:1},right:{layer:1,head:1},row:null},Rr=({layer:t,head:e})=>`${t}.${e}`,Jt=t=>t.split(",").filter(Boolean).map(Number);function we(t){let e=new URLSearchParams;e.set("text",t.text);for(let s of["left","right"])e.set(s,Rr(t[s])),t.added[s].length&&e.set(`${s}-added`,t.added[s].join(","));let{all:r,layers:n,heads:a}=t.lambdas,o=[...r===null?[]:[["all",r]],...Object.entries(n),...Object.entries(a)];return o.length&&e.set("lambda",o.map(([s,i])=>`${s}:${i}`).join(",")),t.answer&&e.set("answer",[t.answer.query,t.answer.begin,t.answer.end].join(",")),t.row!==null&&e.set("row",t.row),`#${e}`}function it(t,e,r){let n=new URLSearchParams(t.slice(1));if(!n.has("text"))return e;let a={...e,text:n.get("text"),answer:null,added:{...Y}};for(let i of["left","right"]){let[l,d]=(n.get(i)??"").split(".").map(Number),c=r[i];c&&l>=1&&l<=c.layers&&d>=1&&d<=c.heads&&(a[i]={layer:Math.floor(l),head:Math.floor(d)});let h=Jt(n.get(`${i}-added`)??"");h.every(Number.isInteger)&&(a.added[i]=h)}a.lambdas={all:null,layers:{},heads:{}};for(let i of(n.get("lambda")??"").split(",")){let[l,d]=i.split(":"),c=Number(d);d===void 0||!Number.isFinite(c)||(l==="all"?a.lambdas.all=c:/^\d+$/.test(l)?a.lambdas.layers[l]=c:/^\d+\.\d+$/.test(l)&&(a.lambdas.heads[l]=c))}let o=Jt(n.get("answer")??"");o.length===3&&o.every(Number.isInteger)&&(a.answer={query:o[0],begin:o[1],end:o[2]});let s=Number(n.get("row")??NaN);return Number.isInteger(s)&&s>=0&&(a.row=s),a}var ce=({all:t,layers:e,heads:r},{layer:n,head:a})=>r[`${n}.${a}`]??e[n]??t,te=({all:t,layers:e,heads:r})=>t!==null||Object.keys(e).length>0||Object.keys(r).length>0;var lt=new Float32Array(65536);for(let t=0;t<lt.length;t++){let e=t>>10&31,r=t&1023,n=e===0?r*2**-24:(1+r/1024)*2**(e-15);lt[t]=t>>15?-n:n}var pe=t=>t*(t+1)/2;function de(t,e=null){let r=new DataView(t);if(r.getUint32(0)!==1146375473)throw new Error("These are no attention maps.");let n=r.getUint32(4,!0),a=r.getUint32(8,!0),o=r.getUint32(12,!0),s=pe(a),i=16,l=null;if(o===2){l=new Float32Array(n),a&&l.set(e.lam.subarray(0,a));for(let c=a;c<n;c++,i+=4)l[c]=r.getFloat32(i,!0)}let d=["first","second"].slice(0,o).map(c=>{let h=new Float32Array(pe(n));a&&h.set(e[c].subarray(0,s));for(let f=s;f<h.length;f++,i+=2)h[f]=lt[r.getUint16(i,!0)];return h});return{length:n,lam:l,first:d[0],second:d[1]??null}}function ct({lam:t,first:e,second:r},n){let a=pe(n);return{length:n,lam:t?.subarray(0,n)??null,first:e.subarray(0,a),second:r?.subarray(0,a)??null}}function Re(t,e=null){if(!t.second)return t.first;let r=new Float32Array(t.first.length);for(let n=0,a=0;n<t.length;n++){let o=e??t.lam[n];for(let s=0;s<=n;s++,a++)r[a]=t.first[a]-o*t.second[a]}return r}var X=(t,e)=>t.subarray(pe(e),pe(e+1));function ye(t,...e){let r=pe(Math.floor(t/4)),n=0;for(let a of e)for(let o=r;o<a.length;o++){let s=Math.abs(a[o]);s>n&&(n=s)}return n||1}function je(t){let e=atob(t),r=new Uint8Array(e.length);for(let n=0;n<e.length;n++)r[n]=e.charCodeAt(n);return r.buffer}var Yt={"\n":"⏎","	":"⇥","\r":"␍"},ke=t=>[...t].map(e=>{if(e in Yt)return Yt[e];let r=e.codePointAt(0);return r<32?String.fromCodePoint(9216+r):r===127?"␡":/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/u.test(e)?`⟨${r.toString(16).toUpperCase()}⟩`:e}).join("");function H(t,e=14){let r=ke(t).replace(/^ +/,a=>"␣".repeat(Math.min(3,a.length))),n=[...r];return n.length>e?`${n.slice(0,e-1).join("")}…`:r||"∅"}var q=(t,e=0)=>`${(100*t).toFixed(e)} %`;function S(t,e=3){return t==null||Number.isNaN(t)?"–":(Math.abs(t)>=.001||t===0?t.toFixed(e):t.toExponential(1)).replace("-","−")}var G=(t,e)=>`${t}.${e}`,pt=({heads:t,noise_heads:e},r)=>e?Math.ceil(r*e/t):null;function ue(t,e){let r=pt(t,e);if(r===null)return"";let n=t.heads/t.noise_heads;return`signal head ${e-(r-1)*n} of noise head ${r}`}function Zt(t,e,r,n){let a=[];for(let s=1;s<r.length;s++){let i=X(e,s),l=0;for(let d=1;d<i.length;d++)Math.abs(i[d])>Math.abs(i[l])&&(l=d);a.push([Math.abs(i[l]),s,l,i[l]])}a.sort((s,i)=>i[0]-s[0]);let o=a.slice(0,3).map(([,s,i,l])=>{let[d,c]=[s,i].map(h=>`token ${h+1} “${H(n[h]??"")}”`);return`${d} gives ${S(l,2)} to ${c}`});return`${t}, ${r.length} by ${r.length} weights. The largest after the first row: ${o.join("; ")}.`}var jr=450;function Qt({models:t,runs:e,view:r,source:n,question:a,onChange:o,onRefusal:s}){let[i,l]=U(!1),[d,c]=U(0),h=N(!1),f=Object.keys(t),p=(n.live||!te(r.lambdas))&&f.every(x=>e[x]&&e[x].tokens.length<t[x].most_tokens),u=async()=>{if(!h.current){h.current=!0;try{let x=await Promise.all(f.map(m=>n.next({...a(m),temperature:d,seed:0})));o(m=>{let _={...m.added};return f.forEach((v,w)=>_[v]=[..._[v],x[w].token]),{added:_,row:null}})}catch(x){l(!1),s({side:"left",message:x.message})}finally{h.current=!1}}};P(()=>{if(!i)return;if(!p){f.every(m=>e[m])&&l(!1);return}let x=setTimeout(u,jr);return()=>clearTimeout(x)});let $=()=>{l(!1),o({added:Y,row:null})},g=x=>e[x]?.pieces.slice(e[x].pieces.length-r.added[x].length)??[];return b`
    <section class="card generation" aria-labelledby="generation-title">
      <h2 id="generation-title">Token by token</h2>
      <div class="buttons">
        <button type="button" disabled=${!p} onClick=${u}>Step</button>
        <button type="button" disabled=${!p&&!i} aria-pressed=${i}
          onClick=${()=>l(!i)}>${i?"Pause":"Play"}</button>
        <button type="button" disabled=${!r.added.left.length} onClick=${$}>Begin again</button>
        ${n.live&&b`<label class="temperature">Temperature
          <select value=${d} onChange=${x=>c(Number(x.target.value))}>
            ${[0,.5,.8,1,1.5].map(x=>b`<option key=${x} value=${x}>${x||"0, most likely"}</option>`)}
          </select>
        </label>`}
      </div>
      ${f.map(x=>r.added[x].length>0&&b`
        <p class="written" key=${x}><span class="quiet">${t[x].label} </span>
          ${g(x).map((m,_,v)=>b`<span class=${_===v.length-1?"last":""}>${ke(m)}</span>${t[x].between}`)}
        </p>`)}
      <p class="quiet">Each token adds a row to every map, at the bottom${f.length>1?"; both models write one at a time":""}.
        ${!n.live&&` This saved page holds what the ${f.length>1?"models write":"model writes"} with the learned λ.`}</p>
    </section>`}function dt(t,e,r){let n=new Float32Array(r*r);for(let a=0,o=0;a<e;a++){let s=r*Math.floor(a*r/e);for(let i=0;i<=a;i++,o++){let l=s+Math.floor(i*r/e);Math.abs(t[o])>Math.abs(n[l])&&(n[l]=t[o])}}return n}function er(t,e,r,n){(t.width!==r||t.height!==r)&&(t.width=t.height=r);let a=t.getContext("2d"),o=a.createImageData(r,r),s=le(n);for(let i=0;i<e.length;i++){let l=3*e[i];o.data[4*i]=s[l],o.data[4*i+1]=s[l+1],o.data[4*i+2]=s[l+2],o.data[4*i+3]=255}a.putImageData(o,0,0)}function He(t,e,r,n,a,o=640){let s=Math.min(r,o),i=dt(e,r,s);er(t,Uint16Array.from(i,l=>Le(l,n)),s,a)}function tr(t,e,r,n,a){let o=t.parentElement.getBoundingClientRect(),s=devicePixelRatio;[t.width,t.height]=[Math.ceil(o.width*s),Math.ceil(o.height*s)];let i=t.getContext("2d");i.imageSmoothingEnabled=!1;let l=document.createElement("canvas");e.forEach((d,c)=>{let h=d.getBoundingClientRect();ut(l,r(c),n,a);let f=[h.left-o.left,h.top-o.top,h.width,h.height];i.drawImage(l,...f.map(p=>Math.round(p*s)))})}function ut(t,e,r,n){er(t,Uint16Array.from(e,a=>255+Math.round(255*a/127)),r,n)}function he(){let t=N(null),[e,r]=U(0);return P(()=>{let n=new ResizeObserver(([a])=>r(Math.floor(a.contentRect.width)));return n.observe(t.current),()=>n.disconnect()},[]),[t,e]}var rr=168,oe={left:44,right:10,top:26,bottom:18};function ht(t,e,r,n,a,o=rr){let s=X(t.first,n),i=X(e,n),l=t.second?r??t.lam[n]:0,d=t.second?X(t.second,n).map(w=>l*w):null,[c,h]=[0,1e-9];for(let w of[s,i,d??s])for(let k of w)k<c&&(c=k),k>h&&(h=k);let f={width:a-oe.left-oe.right,height:o-oe.top-oe.bottom},p=f.width/t.length,u=w=>oe.left+(w+.5)*p,$=w=>oe.top+(h-w)/(h-c)*f.height,g=w=>`M${Array.from(w,(k,E)=>`${u(E).toFixed(1)},${$(k).toFixed(1)}`).join("L")}`,x=Math.max(1,Math.min(14,p*.62)),m=Array.from(i,(w,k)=>[u(k)-x/2,$(Math.max(0,w)),x,Math.abs($(w)-$(0)),w]),_=Array.from(i,(w,k)=>[Math.abs(w),k]).sort((w,k)=>k[0]-w[0]).slice(0,4).filter(([w])=>w>.08*h).map(([,w])=>w),v=_.filter((w,k)=>_.slice(0,k).every(E=>Math.abs(u(w)-u(E))>56));return{first:g(s),taken:d&&g(d),bars:m,zero:$(0),x:u,y:$,low:c,high:h,labelled:v,left:i,end:a-oe.right}}function nr({maps:t,net:e,lam:r,pieces:n,row:a,isPinned:o}){let[s,i]=he(),l=i>120?ht(t,e,r,a,i):null;return b`
    <figure class="curve" ref=${s}>
      <figcaption>
        <span>Row of token ${a+1} <b>${H(n[a]??"",24)}</b>${o?b` <span class="quiet">pinned</span>`:""}</span>
        ${t.second&&b`<span class="legend" aria-hidden="true"><i class="first"></i>A₁<i class="taken"></i>λA₂<i class="net"></i>A₁ − λA₂</span>`}
      </figcaption>
      ${l&&b`
        <svg width=${i} height=${rr} role="img" aria-label=${Hr(l,n,a)}>
          <line class="axis" x1="44" x2=${l.end} y1=${l.zero} y2=${l.zero} />
          <text class="tick" x="38" y=${l.y(l.high)} dy="0.32em" text-anchor="end">${S(l.high,2)}</text>
          <text class="tick" x="38" y=${l.zero} dy="0.32em" text-anchor="end">0</text>
          ${l.low<-.12*l.high&&b`<text class="tick" x="38" y=${l.y(l.low)} dy="0.32em" text-anchor="end">${S(l.low,2)}</text>`}
          ${l.bars.map(([d,c,h,f,p],u)=>b`<rect key=${u} class=${p<0?"net negative":"net"} x=${d} y=${p<0?l.zero:c} width=${h} height=${f} />`)}
          <path class="first" d=${l.first} />
          ${l.taken&&b`<path class="taken" d=${l.taken} />`}
          ${l.labelled.map(d=>b`<text key=${`l${d}`} class="peak" x=${Math.max(60,Math.min(l.end-20,l.x(d)))}
            y=${l.y(Math.max(l.left[d],0))-7} text-anchor="middle">${H(n[d]??"",10)}</text>`)}
        </svg>`}
    </figure>`}var Hr=(t,e,r)=>`What token ${r+1} “${H(e[r]??"")}” attends to after the subtraction, most to ${t.labelled.map(n=>`token ${n+1} “${H(e[n]??"")}” with ${S(t.left[n],2)}`).join(", ")}.`;var Me={light:["#1c1e22","#6b6f76","#fbfaf7"],dark:["#eceae4","#9a9da4","#121419"]},Ie={light:["#1766a6","#c9620b"],dark:["#5cace7","#eb903c"]},Ir="system-ui, -apple-system, 'Segoe UI', sans-serif",Dr=t=>t.replace(/[&<>"]/g,e=>`&#${e.charCodeAt(0)};`);function I(t,e,r,{size:n=12,colour:a,anchor:o="start",weight:s=400,turn:i=0}){let l=i?` transform="rotate(${i} ${t} ${e})"`:"";return`<text x="${t}" y="${e}" font-size="${n}" fill="${a}" text-anchor="${o}" font-weight="${s}"${l}>${Dr(r)}</text>`}function ft(t,e,r,n){return[`<svg xmlns="http://www.w3.org/2000/svg" width="${t}" height="${e}" viewBox="0 0 ${t} ${e}" font-family="${Ir}">`,`<rect width="${t}" height="${e}" fill="${Me[r][2]}"/>`,...n,"</svg>"].join(`
`)}var ar=(t,e,r,n)=>`<image x="${e}" y="${r}" width="${n}" height="${n}" style="image-rendering:pixelated" href="${t.toDataURL("image/png")}"/>`;function Ur({models:t,view:e,panels:r,pieces:n,row:a,scale:o,lam:s,theme:i,left:l,net:d}){let[c,h]=Me[i],f=300,p=52,u=28,$=40+r.length*(f+p)+(r.length-1)*u,g=[I(20,34,`${t.left.name}: layer ${e.left.layer}, head ${[e.left.head,ue(t.left,e.left.head)].filter(Boolean).join(", ")}${s==null?"":`, λ = ${S(s,2)}`}`,{size:17,colour:c,weight:600})];r.forEach((w,k)=>{let E=20+p+k*(f+p+u),A=66+p,D=document.createElement("canvas");He(D,w.weights,w.maps.length,o,i),g.push(I(E,A-p-8,w.name,{size:14,colour:c,weight:600}),ar(D,E,A,f));let L=f/w.maps.length;for(let R=0;R<w.maps.length;R+=Math.max(1,Math.ceil(11/L))){let j=H(n[w.side][R]??"",8),O=(R+.5)*L+3.5;g.push(I(E-4,A+O,j,{size:9.5,colour:h,anchor:"end"})),g.push(I(E+O,A-4,j,{size:9.5,colour:h,turn:-90}))}g.push(`<rect x="${E}" y="${A+Math.min(a,w.maps.length-1)*L}" width="${f}" height="${Math.max(1.5,L)}" fill="none" stroke="${c}"/>`)});let x=66+p+f+40,m=Math.min(a,l.length-1),_=ht(l,d,l.second?s:null,m,$-40);g.push(I(20,x,`Row of token ${m+1} “${H(n.left[m]??"",24)}”`,{size:13,colour:c,weight:600})),g.push(`<g transform="translate(20 ${x+6})">`),g.push(..._.bars.map(([w,k,E,A,D])=>`<rect x="${w}" y="${D<0?_.zero:k}" width="${E}" height="${A}" fill="${c}" opacity="0.32"/>`)),g.push(`<path d="${_.first}" fill="none" stroke="${Ie[i][0]}" stroke-width="1.6"/>`),_.taken&&g.push(`<path d="${_.taken}" fill="none" stroke="${Ie[i][1]}" stroke-width="1.6"/>`),g.push(`<line x1="44" x2="${_.end}" y1="${_.zero}" y2="${_.zero}" stroke="${h}"/>`),g.push(..._.labelled.map(w=>I(_.x(w),_.y(Math.max(0,_.left[w]))-7,H(n.left[w]??"",12),{size:11,colour:c,anchor:"middle"}))),g.push(I(38,_.y(_.high)+4,S(_.high,2),{size:10,colour:h,anchor:"end"}),"</g>");let v=x+200;return g.push(...Br(36,v,o,i)),l.second&&g.push(I($-20,v+10,"blue line A₁, orange line λA₂, bars A₁ − λA₂",{size:11,colour:h,anchor:"end"})),ft($,v+44,i,g)}function Br(t,e,r,n){let a=le(n),o=[];for(let s=0;s<64;s++){let i=3*Math.round(510*s/63);o.push(`<rect x="${t+4*s}" y="${e}" width="4.2" height="10" fill="rgb(${a[i]},${a[i+1]},${a[i+2]})"/>`)}return[-1,0,1].forEach(s=>o.push(I(t+128*(1+s),e+24,S(s*r,2),{size:10,colour:Me[n][1],anchor:"middle"}))),o}function Fr(t,e,r,n){let[a,o]=Me[n],s=t.heads>8?48:96,i=s+(t.heads>8?8:24),l=[I(20,34,`${t.name}: ${t.label}, all heads`,{size:17,colour:a,weight:600})];for(let d=1;d<=t.layers;d++){let c=56+(d-1)*i;l.push(I(34,c+s/2+4,String(d),{size:11,colour:o,anchor:"end"}));for(let h=1;h<=t.heads;h++){let f=44+(h-1)*(s+8),p=document.createElement("canvas");if(ut(p,r((d-1)*t.heads+h-1),e.picture_size,n),l.push(ar(p,f,c,s)),s>60){let u=e.removed?.[d-1][h-1],$=u===void 0?G(d,h):`${G(d,h)}  −${q(u)}`;l.push(I(f,c+s+14,$,{size:10.5,colour:o}))}}}return ft(64+t.heads*(s+8),64+t.layers*i+8,n,l)}function or(t,e){let r=document.createElement("a");r.href=URL.createObjectURL(t),r.download=e,r.click(),setTimeout(()=>URL.revokeObjectURL(r.href),1e4)}async function mt(t,e,r){let n=new Blob([t],{type:"image/svg+xml"});if(r==="svg"){or(n,`${e}.svg`);return}let a=new Image;a.src=URL.createObjectURL(n),await a.decode();let o=document.createElement("canvas");[o.width,o.height]=[2*a.width,2*a.height],o.getContext("2d").drawImage(a,0,0,o.width,o.height),URL.revokeObjectURL(a.src),o.toBlob(s=>or(s,`${e}.png`),"image/png")}function Wr(t,{next:e,divergence:r,loss:n,learned_loss:a},o){let[s,i]=Me[o],l=e.slice(0,10),d=Math.max(...l.flatMap(_=>[_.probability,_.learned_probability]),1e-9),c=r>0,[h,f,p]=[140,260,24],u=h+f+(c?140:80),$=[I(20,34,`${t.name}: next token`,{size:17,colour:s,weight:600})];l.forEach((_,v)=>{let w=56+v*p,[k,E]=[_.probability,_.learned_probability].map(A=>f*A/d);$.push(I(h-8,w+14,H(_.piece),{colour:s,anchor:"end"}),`<rect x="${h}" y="${w+3}" width="${Math.max(1,k)}" height="${p-8}" fill="${Ie[o][0]}"/>`,I(h+f+58,w+14,q(_.probability,1),{colour:s,anchor:"end"})),c&&$.push(`<rect x="${h+E-1}" y="${w}" width="2" height="${p-2}" fill="${Ie[o][1]}"/>`,I(h+f+120,w+14,q(_.learned_probability,1),{colour:i,anchor:"end"}))});let g=56+l.length*p+22,x=c?`${S(n)} (${S(a)})`:S(n),m=c?`KL ${S(r)} nats, loss on the text ${x}; orange, grey: learned λ`:`loss on the text ${x}`;return $.push(I(20,g,m,{size:11,colour:i})),ft(u,g+18,o,$)}var sr=(t,e)=>mt(Ur(t),`head-${G(t.view.left.layer,t.view.left.head)}`,e),ir=(t,e,r,n)=>mt(Wr(t,e,r),`next-${t.name}`,n),lr=(t,e,r,n,a)=>mt(Fr(t,e,r,n),`heads-${t.name}`,a);var fe=({disabled:t,onSave:e})=>["PNG","SVG"].map(r=>b`<button type="button" key=${r} class="link" disabled=${t} onClick=${()=>e(r.toLowerCase())}>${r}</button>`);var Gr={ArrowLeft:[0,-1],ArrowRight:[0,1],ArrowUp:[-1,0],ArrowDown:[1,0]};function cr({side:t,model:e,heads:r,isBusy:n,chosen:a,theme:o,onChoose:s}){let i=N(null),l=N(null),[d,c]=he(),h=J(()=>{if(!r)return null;let m=typeof r.pictures=="string"?new Int8Array(je(r.pictures)):r.pictures,_=r.picture_size**2;return v=>m.subarray(v*_,(v+1)*_)},[r?.pictures]);P(()=>{h&&tr(l.current,d.current.querySelectorAll(".picture"),h,r.picture_size,o)},[r,o,c]);let f=m=>{let _=Gr[m.key];if(!_)return;m.preventDefault();let v=Math.min(e.layers,Math.max(1,a.layer+_[0])),w=Math.min(e.heads,Math.max(1,a.head+_[1]));s({layer:v,head:w}),i.current.querySelector(`[data-head="${G(v,w)}"]`)?.focus()},p=m=>Array.from({length:m},(_,v)=>v+1),u=(m,_)=>r?.removed?.[m-1][_-1],$=(m,_)=>r?.on_answer?.[m-1][_-1],g=(m,_)=>[`Head ${G(m,_)}`,ue(e,_),u(m,_)!==void 0&&`the subtraction removes ${q(u(m,_))} of A1`,$(m,_)!==void 0&&`${q($(m,_))} on the answer`].filter(Boolean).join(", "),x=e.heads>8;return b`
    <section class=${`card grid-card ${x?"dense":""}`} aria-labelledby=${`grid-${t}`}>
      <div class="card-head">
        <h2 id=${`grid-${t}`}>${e.label}, all heads</h2>
        <span class="buttons">
          <${fe} disabled=${!r} onSave=${m=>lr(e,r,h,o,m)} />
        </span>
      </div>
      <div class="scroll"><div class="sheet" ref=${d}>
        <canvas ref=${l} width="8" height="8" aria-hidden="true"></canvas>
        <div class="grid" role="grid" aria-label=${`Heads of ${e.name}`} aria-busy=${n} ref=${i} onKeyDown=${f}
          style=${`--heads:${e.heads};--thumb:${x?44:e.heads>4?92:124}px`}>
          ${p(e.layers).map(m=>b`
            <div class="grid-row" role="row" key=${m}>
              <span class="layer" role="rowheader"><span class="hidden">Layer </span>${m}</span>
              ${p(e.heads).map(_=>{let v=a.layer===m&&a.head===_;return b`
                  <button type="button" role="gridcell" key=${_} class=${`head ${v?"chosen":""}`}
                    aria-selected=${v} tabindex=${v?0:-1} data-head=${G(m,_)}
                    aria-label=${g(m,_)} title=${g(m,_)} onClick=${()=>s({layer:m,head:_})}>
                    <span class="picture"></span>
                    ${!x&&b`<span class="numbers" aria-hidden="true">
                      ${u(m,_)!==void 0&&b`<span>${u(m,_)>.005?"−":""}${q(u(m,_))}</span>`}
                      ${$(m,_)!==void 0&&b`<span class="on-answer">◎ ${q($(m,_))}</span>`}
                    </span>`}
                    ${x&&u(m,_)!==void 0&&b`<span class="gauge" aria-hidden="true" style=${{width:`${100*u(m,_)}%`}}></span>`}
                  </button>`})}
            </div>`)}
        </div>
      </div></div>
      <p class="quiet">
        Rows are layers, the first on top.
        ${e.subtracts&&(x?" The bar is the share of A₁ that the subtraction removes.":" −n %: the share of A₁ that the subtraction removes.")}
        ${r?.on_answer&&!x?" ◎: the share of the attention that is on the answer.":""}
      </p>
    </section>`}var Vr=46,Kr=11;function pr({panel:t,pieces:e,size:r,scale:n,theme:a,row:o,answer:s,added:i,onHover:l,onPin:d}){let c=N(null),{maps:h,weights:f,name:p}=t;P(()=>{He(c.current,f,h.length,n,a)},[f,h.length,n,a]);let u=r>=200?Vr:0,$=r-u,g=$/h.length,x=Math.max(1,Math.ceil(Kr/g)),m=[];if(u)for(let k=0;k<h.length;k+=x)m.push(k);let _=k=>{let E=c.current.getBoundingClientRect(),A=Math.floor((k.clientY-E.top)/E.height*h.length);return Math.max(0,Math.min(h.length-1,A))},v=k=>u+(k+.5)*g,w=s&&s.end<=h.length;return b`
    <figure class=${`map ${t.strong?"strong":""}`}>
      <figcaption>${p}</figcaption>
      <div class="map-box" style=${{width:`${r}px`,height:`${r}px`}}>
        <canvas ref=${c} width="8" height="8" role="img" aria-label=${Zt(p,f,h,e)}
          data-map=${t.key} style=${{left:`${u}px`,top:`${u}px`,width:`${$}px`,height:`${$}px`}}
          onPointerMove=${k=>l(_(k))} onPointerLeave=${()=>l(null)}
          onClick=${k=>d(_(k))}></canvas>
        <svg width=${r} height=${r} aria-hidden="true">
          ${m.map(k=>b`
            <text key=${`r${k}`} x=${u-4} y=${v(k)} class=${k===o?"on":""} dy="0.32em"
              text-anchor="end">${H(e[k]??"",7)}</text>
            <text key=${`c${k}`} transform=${`translate(${v(k)} ${u-4}) rotate(-90)`} dy="0.32em">${H(e[k]??"",7)}</text>`)}
          ${w&&b`<rect class="answer" x=${u+s.begin*g} y=${u}
            width=${Math.max(1.5,(s.end-s.begin)*g)} height=${$} />`}
          ${i>0&&b`<line class="added" x1=${u} x2=${r} y1=${u+(h.length-i)*g}
            y2=${u+(h.length-i)*g} />`}
          <rect class="row" x=${u} y=${u+o*g} width=${$} height=${Math.max(2,g)} />
        </svg>
      </div>
    </figure>`}function dr({scale:t,theme:e}){let r=N(null);P(()=>{let a=r.current.getContext("2d"),o=a.createImageData(511,1),s=le(e);for(let i=0;i<511;i++){for(let l=0;l<3;l++)o.data[4*i+l]=s[3*i+l];o.data[4*i+3]=255}a.putImageData(o,0,0)},[e]);let n=[-1,-.25,0,.25,1];return b`
    <div class="scale" role="img" aria-label=${`Colours from orange at −${S(t,2)} over the background at 0 to blue at ${S(t,2)}`}>
      <canvas ref=${r} width="511" height="1"></canvas>
      <div class="ticks" aria-hidden="true">
        ${n.map(a=>b`<span key=${a} style=${{left:`${50+50*Math.sign(a)*Math.sqrt(Math.abs(a))}%`}}>${Math.abs(a)===1?`${a<0?"≤ ":"≥ "}${S(a*t,2)}`:S(a*t,2)}</span>`)}
      </div>
    </div>`}function ur({pieces:t,values:e,scale:r,theme:n,row:a,pinned:o,answer:s,added:i,between:l,onHover:d,onPin:c,onAnswer:h}){let f=N(null),p=s!==null&&o>=s.begin&&o<s.end,u=x=>{let _={ArrowLeft:-1,ArrowRight:1,ArrowUp:-10,ArrowDown:10,Home:-t.length,End:t.length}[x.key];if(x.key==="Escape"&&o!==null)c(o);else if(_!==void 0){x.preventDefault();let v=Math.max(0,Math.min(t.length-1,a+_));d(null),v!==o&&c(v)}},$=x=>{let m=x.target.closest("[data-token]");return m?Number(m.dataset.token):null},g=x=>["token",x===a&&"on",x===o&&"pinned",s&&x>=s.begin&&x<s.end&&"answer",x>=t.length-i&&"new"].filter(Boolean).join(" ");return b`
    <div class="flow-head">
      <span class="quiet">What token <b>${a+1}</b> attends to. Hover a token or use the arrow keys; a click pins it${o!==null?", Esc lets go":""}.</span>
      ${h&&o!==null&&o<t.length-1&&b`<button type="button" class="link"
          onClick=${()=>h(p?null:{query:t.length-1,begin:o,end:o+1})}>${p?"No longer the answer":"Mark as the answer"}</button>`}
    </div>
    <div class=${`flow ${l?"spaced":""}`} role="listbox" tabindex="0" aria-label="Tokens of the text" ref=${f}
      aria-activedescendant=${`token-${a}`} onKeyDown=${u} onPointerOver=${x=>d($(x))}
      onPointerLeave=${()=>d(null)} onClick=${x=>$(x)!==null&&c($(x))}>
      ${t.map((x,m)=>{let _=m<e.length?e[m]:0,v=m<e.length?{background:Vt(_,r,n),color:Kt(_,r,n)}:{};return b`<span key=${m} id=${`token-${m}`} class=${g(m)} style=${v} role="option"
          data-token=${m} aria-selected=${m===a} title=${`token ${m+1}: ${S(_)}`}>${ke(x)}</span>${x.includes(`
`)?b`<br />`:""}`})}
    </div>`}function Jr({heads:t,kv_heads:e},{head:r}){if(e===t)return"";let n=t/e,a=Math.ceil(r/n);return`shares key/value head ${a} with heads ${(a-1)*n+1}–${a*n}`.replace(/heads (\d+)–\1$/,"head $1")}function hr({models:t,runs:e,maps:r,view:n,theme:a,row:o,hovered:s,shared:i,onHover:l,onChange:d,live:c,hasAddress:h}){let[f,p]=he(),[u,$]=[r.left,r.right],g=u&&u.head.layer===n.left.layer&&u.head.head===n.left.head,x=t.left.subtracts?ce(n.lambdas,n.left):null,m=g?x:null,_=J(()=>u?Re(u,m):null,[u,m]),v=J(()=>u?Math.max(ye(u.length,u.first,u.second??[],_),$?ye($.length,$.first):0):1,[u,$,_]),w={left:e.left?.pieces??[],right:e.right?.pieces??[]},k=u?m??u.lam?.[Math.min(o,u.length-1)]:null,E=G(n.left.layer,n.left.head),A=[];if(u?.second){let M=pt(t.left,u.head.head),V=M===null?"A₂":`A₂ of noise head ${M}`;A.push({key:"first",name:"A₁",side:"left",maps:u,weights:u.first}),A.push({key:"second",name:V,side:"left",maps:u,weights:u.second}),A.push({key:"net",name:"A₁ − λA₂",side:"left",maps:u,weights:_,strong:!0})}if($){let M=`${t.right.label} ${G($.head.layer,$.head.head)}`;A.push({key:"right",name:M,side:"right",maps:$,weights:$.first})}let D=p>=(A.length===3?540:860)?A.length:Math.min(2,A.length),L=p>=860?20:12,R=Math.max(0,Math.floor((p-L*(D-1))/Math.max(1,D))),j=M=>d(V=>({row:V.row===M?null:M})),O=[ue(t.left,n.left.head),Jr(t.left,n.left)];t.left.lambda_per_token&&O.push("a λ for every token");let y={models:t,view:n,panels:A,pieces:w,row:o,scale:v,lam:k,theme:a,left:u,net:_,right:$};return b`
    <section class="card head-view" aria-labelledby="head-title">
      <div class="card-head">
        <h2 id="head-title">
          Layer ${n.left.layer}, head ${n.left.head}
          ${k!=null&&b` <span class="quiet">λ = ${S(k,2)}</span>`}
          ${O.filter(Boolean).map(M=>b` <span class="quiet note">${M}</span>`)}
        </h2>
        <span class="buttons">
          ${h&&b`<button type="button" class="link" onClick=${()=>navigator.clipboard?.writeText(location.href.split("#")[0]+we(n))}>Copy link</button>`}
          <${fe} disabled=${!u} onSave=${M=>sr(y,M)} />
        </span>
      </div>
      <div ref=${f} class="panels" style=${{gridTemplateColumns:`repeat(${D||1}, 1fr)`,gap:`${L}px`}}>
        ${R>0&&A.map(M=>b`
          <${pr} key=${M.key} panel=${M} pieces=${w[M.side]} size=${R} scale=${v} theme=${a}
            row=${Math.min(o,M.maps.length-1)} answer=${M.side==="left"||i?n.answer:null}
            added=${n.added[M.side].length} head=${M.side==="left"?E:null}
            onHover=${l} onPin=${j} />`)}
      </div>
      <${dr} scale=${v} theme=${a} />
      ${u&&b`
        <${ur} pieces=${w.left.slice(0,u.length)} values=${X(_,Math.min(o,u.length-1))} scale=${v} theme=${a}
          between=${t.left.between} row=${Math.min(o,u.length-1)} pinned=${n.row} answer=${n.answer} added=${n.added.left.length}
          onHover=${l} onPin=${j} onAnswer=${c?M=>d({answer:M}):null} />
        <${nr} maps=${u} net=${_} lam=${m} pieces=${w.left} row=${Math.min(o,u.length-1)}
          isPinned=${n.row!==null&&s===null} />`}
      ${!c&&Xr(x)}
    </section>`}var Xr=t=>t!==null&&b`<p class="quiet">In this saved page A₁ and A₂ are those of the learned λ; the explorer’s server computes them anew.</p>`;var Yr=-.5,Zr=1.5,_t=t=>t.reduce((e,r)=>e+r,0)/t.length;function xt({id:t,name:e,note:r,value:n,learned:a,isSet:o,inherited:s,main:i,onInput:l,onLearned:d}){let c=Math.min(Yr,Math.floor(10*a)/10),h=Math.max(Zr,Math.ceil(10*a)/10),f=u=>(u-c)/(h-c),p=Math.max(c,Math.min(h,n));return b`
    <div class=${`slider ${i?"main":""} ${o?"set":""}`}>
      <div class="slider-head">
        <label for=${t}>${e}${r&&b` <span class="quiet">${r}</span>`}</label>
        <output for=${t}>λ = ${S(n,2)}</output>
      </div>
      <div class="track" style=${`--zero-part:${f(0)};--learned-part:${f(a)}`}>
        <input id=${t} type="range" min=${c} max=${h} step="0.01" value=${p}
          aria-valuetext=${`λ ${S(n,2)}; learned ${S(a,2)}`}
          onInput=${u=>l(Number(u.target.value))} />
        <span class="mark zero" aria-hidden="true"></span>
        <span class="mark learned" aria-hidden="true"></span>
      </div>
      <div class="slider-foot">
        <span class="quiet">${o?`learned ${S(a,2)}`:s?"as set above":"as learned"}</span>
        <span class="buttons">
          <button type="button" disabled=${!o} onClick=${d}
            aria-label=${`${e}: back to ${s?"what is set above":"the learned λ"}`}>
            ${s?"As above":"Learned"}
          </button>
          <button type="button" onClick=${()=>l(0)} aria-label=${`${e}: set λ to 0`}>0</button>
        </span>
      </div>
    </div>`}var fr=(t,e)=>Object.fromEntries(Object.entries(t).filter(([r])=>r!==String(e)));function mr({model:t,run:e,place:r,lambdas:n,onChange:a}){if(!e?.learned_lambdas)return b`<section class="card lambda" aria-busy="true"><h2>λ</h2></section>`;let o=e.learned_lambdas,{layer:s,head:i}=r,l=`${s}.${i}`,{all:d,layers:c,heads:h}=n,f=_t(o[s-1]),p=d===null?"on average":"";return b`
    <section class="card lambda" aria-labelledby="lambda-title">
      <div class="card-head">
        <h2 id="lambda-title">Move λ</h2>
        <button type="button" class="link" disabled=${!te(n)}
          onClick=${()=>a({all:null,layers:{},heads:{}})}>All as learned</button>
      </div>
      <${xt} id="lambda-all" main name="All layers" note=${p} value=${d??_t(o.flat())}
        learned=${_t(o.flat())} isSet=${d!==null}
        onInput=${u=>a({all:u,layers:{},heads:{}})}
        onLearned=${()=>a({...n,all:null})} />
    </section>
    <div class="finer">
      <details open=${Object.keys(c).length+Object.keys(h).length>0||void 0}>
        <summary>One layer, one head</summary>
        <${xt} id="lambda-layer" name=${`Layer ${s}`} value=${c[s]??d??f}
          learned=${f} isSet=${s in c} inherited=${d!==null}
          onInput=${u=>a({...n,layers:{...c,[s]:u}})}
          onLearned=${()=>a({...n,layers:fr(c,s)})} />
        <${xt} id="lambda-head" name=${`Head ${l}`} value=${ce(n,r)??o[s-1][i-1]}
          learned=${o[s-1][i-1]} isSet=${l in h} inherited=${d!==null||s in c}
          onInput=${u=>a({...n,heads:{...h,[l]:u}})}
          onLearned=${()=>a({...n,heads:fr(h,l)})} />
      </details>
      <p class="quiet hint">
        λ = 0 leaves A<sub>1</sub>: ordinary attention.
        ${t.lambda_per_token?" The model computes a λ for every token; a slider gives all of them the same.":""}
        ${e.recorded_at!==void 0?` What the model predicts was recorded at λ = ${S(e.recorded_at,2)}.`:""}
      </p>
    </div>`}function ae({name:t,value:e,before:r,title:n}){return b`
    <tr title=${n}>
      <th scope="row">${t}</th>
      <td><b>${e}</b></td>
      <td class="before">${r??""}</td>
    </tr>`}function _r({run:t,right:e,models:r,theme:n}){if(!t)return b`<section class="card predictions" aria-busy="true"><h2>Next token</h2></section>`;if(t.is_recorded===!1)return b`<section class="card predictions">
      <h2>Next token</h2>
      <p class="quiet">What the model predicts with these λ was not recorded in this saved page; <code>diff-transformer explore</code> computes it.</p>
    </section>`;let a=t.next.slice(0,10),o=Math.max(...t.next.flatMap(l=>[l.probability,l.learned_probability]),1e-9),s=l=>({width:`${100*l/o}%`}),i=t.divergence>0;return b`
    <section class="card predictions" aria-labelledby="next-title">
      <div class="card-head">
        <h2 id="next-title">Next token</h2>
        <span class="buttons"><${fe} onSave=${l=>ir(r.left,t,n,l)} /></span>
      </div>
      <table class="bars">
        <caption class="hidden">The ten most likely next tokens, with λ as set and as learned</caption>
        <thead class="hidden"><tr><th>token</th><th>bar</th><th>probability</th><th>with the learned λ</th></tr></thead>
        <tbody>
          ${a.map(l=>b`
            <tr key=${l.token}>
              <th scope="row">${H(l.piece)}</th>
              <td class="bar" aria-hidden="true">
                <span class="now" style=${s(l.probability)}></span>
                <span class="was" style=${{left:`${100*l.learned_probability/o}%`}}></span>
              </td>
              <td class="value">${q(l.probability,1)}</td>
              <td class="value was-value">${i?q(l.learned_probability,1):""}</td>
            </tr>`)}
        </tbody>
      </table>
      ${i&&b`<p class="quiet key"><span class="was-key"></span> with the learned λ</p>`}
      <table class="measures" aria-live="polite">
        <thead><tr><td></td><th scope="col">now</th><th scope="col">learned λ</th></tr></thead>
        <tbody>
          <${ae} name="KL to the learned λ" value=${`${S(t.divergence)} nats`}
            title="KL(learned ‖ now) of the next token’s distributions" />
          <${ae} name="Loss on the text" value=${S(t.loss)} before=${S(t.learned_loss)}
            title="Mean over the tokens from the second on, in nats" />
          ${t.answer_probability!==void 0&&b`<${ae} name="Probability of the answer"
            value=${q(t.answer_probability,1)} before=${q(t.learned_answer_probability,1)} />`}
          ${t.answer_share!==void 0&&b`<${ae} name="Attention on the answer" value=${q(t.answer_share,1)}
            before=${q(t.learned_answer_share,1)}
            title="Mean over heads of the share of the absolute weights in the row of the question" />`}
        </tbody>
        ${e&&b`<tbody class="beside">
          <tr><th scope="rowgroup" colspan="3">${r.right.label}</th></tr>
          <${ae} name="Loss on the text" value=${S(e.loss)} />
          ${e.answer_probability!==void 0&&b`<${ae} name="Probability of the answer" value=${q(e.answer_probability,1)} />`}
          ${e.answer_share!==void 0&&b`<${ae} name="Attention on the answer" value=${q(e.answer_share,1)} />`}
          <tr><th scope="row">Next token</th><td colspan="2">${e.next.slice(0,2).map(l=>`“${H(l.piece)}” ${q(l.probability)}`).join(", ")}</td></tr>
        </tbody>`}
      </table>
    </section>`}var me=class extends Error{},De=class{live=!0;hasAddress=!0;constructor(e="api/"){this.address=e}async#e(e,r){let n;try{n=await fetch(this.address+e,{method:"POST",headers:{"Content-Type":"application/json"},body:JSON.stringify(r)})}catch{throw new me("The explorer does not answer; its command may have ended.")}if(!n.ok){let a=await n.json().catch(()=>({}));throw new me(a.error??`The explorer answered ${n.status}.`)}return n}run=async e=>(await this.#e("run",e)).json();map=async(e,r)=>de(await(await this.#e("map",e)).arrayBuffer(),r);next=async e=>(await this.#e("next",e)).json();example=async e=>(await this.#e("example",e)).json()},Ae=class{#e=!1;#t=null;answered=Promise.resolve();ask(e){if(this.#e){this.#t=e;return}this.#e=!0,this.answered=e().finally(()=>{this.#e=!1;let r=this.#t;this.#t=null,r&&this.ask(r)})}get waits(){return this.#t!==null}};function xr({data:t,source:e,view:r,onChange:n,onRefusal:a}){let[o,s]=U(r.text),i=N(0),l=N(null);P(()=>s(r.text),[r.text]);let d=(f,p=null)=>{clearTimeout(l.current),n({text:f,answer:p,added:Y,row:null})},c=f=>{s(f),clearTimeout(l.current),l.current=setTimeout(()=>d(f),350)},h=async()=>{try{i.current+=1;let f=await e.example({seed:i.current});d(f.text,f.answer)}catch(f){a({side:"left",message:f.message})}};return b`
    <section class="card text" aria-labelledby="text-title">
      <div class="card-head">
        <h2 id="text-title"><label for="text">Text</label></h2>
        ${e.live&&t.draws_examples&&b`<button type="button" class="link" onClick=${h}>New needles</button>`}
      </div>
      <textarea id="text" rows="4" spellcheck="false" readonly=${!e.live} value=${o}
        onInput=${f=>c(f.target.value)}></textarea>
      ${e.live&&t.examples.length>0&&b`<p class="examples">
        ${t.examples.map(f=>b`<button type="button" class="chip" key=${f.title}
            onClick=${()=>d(f.text,f.answer)}>${f.title}</button>`)}
      </p>`}
      ${!e.live&&b`<p class="quiet">This page was saved with its text; <code>diff-transformer explore</code> takes any other.</p>`}
    </section>`}var gr={few:48,many:32},Qr=300;function en(){let[t,e]=U(st);return P(()=>{let r=matchMedia("(prefers-color-scheme: dark)"),n=()=>e(st());return r.addEventListener("change",n),()=>r.removeEventListener("change",n)},[]),t}function tn(t,e){let r=t.examples[0],n={...Xt,text:r?.text??"",answer:r?.answer??null};return it(e,n,t.models)}function rn({on_answer:t,removed:e}){let r=t??e;if(!r)return null;let n={layer:1,head:1,number:-1};return r.forEach((a,o)=>a.forEach((s,i)=>{s>n.number&&(n={layer:o+1,head:i+1,number:s})})),{layer:n.layer,head:n.head}}function br({data:t,source:e,root:r}){let{models:n}=t,a=Object.keys(n),o=en(),s=e.hasAddress?location.hash:"",[i,l]=U(()=>tn(t,s)),d=e.shown?.(i)??i,[c,h]=U({}),[f,p]=U({}),[u,$]=U(null),[g,x]=U(null),m=J(()=>Object.fromEntries(["left","right"].map(y=>[y,{run:new Ae,map:new Ae}])),[]),_=N({}),v=N(s.length>1?{left:!0,right:!0}:{}),w=Bt(y=>l(M=>({...M,...y instanceof Function?y(M):y})),[]),k=y=>{let M={side:y,text:d.text};return d.added[y].length&&(M.append=d.added[y]),y==="left"&&te(d.lambdas)&&(M.lambdas=d.lambdas),M},E=y=>d.answer&&(y==="left"||t.shared_vocabulary)?{answer:d.answer}:{};for(let y of a){let M=k(y),V={...M,...E(y)};P(()=>{if(!d.text.trim())return;let K=n[y].layers*n[y].heads>64?gr.many:gr.few,se=B=>h(F=>({...F,[y]:F[y]&&{...F[y],waitsForHeads:B}}));se(!0),m[y].run.ask(async()=>{try{y==="right"&&await m.left.run.answered;let B=await e.run(V);if($(W=>W?.side===y?null:W),h(W=>({...W,[y]:{heads:W[y]?.heads,...B,waitsForHeads:!B.heads}})),m[y].run.waits||B.heads)return;let F=await e.run({...V,picture:K});h(W=>({...W,[y]:F}));let ie=v.current[y]?null:rn(F.heads);if(ie&&(v.current[y]=!0),!ie)return;if(w({[y]:ie}),y==="left"&&n.right&&!d.answer&&!v.current.right){let{layers:W,heads:Se}=n.right;w({right:{layer:Math.min(ie.layer,W),head:Math.min(ie.head,Se)}})}}catch(B){se(!1),$({side:y,message:B.message})}})},[JSON.stringify(V)]);let Z=d[y];P(()=>{d.text.trim()&&m[y].map.ask(async()=>{try{y==="right"&&await m.left.run.answered;let{append:K,...se}=M,B=JSON.stringify([se,Z]),F=_.current[y],W=F?.key===B&&F.append.every((Fe,yr)=>K?.[yr]===Fe)&&K?.length>F.append.length?F.maps.length:0,Se={...M,layer:Z.layer,head:Z.head},gt=await e.map(W?{...Se,first_row:W}:Se,F?.maps);_.current[y]={key:B,append:K??[],maps:gt},p(Fe=>({...Fe,[y]:{...gt,head:Z}}))}catch(K){$({side:y,message:K.message})}})},[JSON.stringify([M,Z])])}let A=c.left,D=A?.tokens.length??0,L=d.added.left.length?D-1:d.answer?.query??D-1,R=Math.max(0,Math.min(g??d.row??L,D-1));P(()=>{r.dataset.theme=o,r.dataset.ready=String(!!(A?.heads&&f.left))}),P(()=>{if(!e.hasAddress)return;let y=setTimeout(()=>history.replaceState(null,"",we(d)),Qr);return()=>clearTimeout(y)},[we(d)]),P(()=>{if(!e.hasAddress)return;let y=()=>l(M=>it(location.hash,M,n));return addEventListener("hashchange",y),()=>removeEventListener("hashchange",y)},[]);let j=a.map(y=>{let{heads:M,waitsForHeads:V}=c[y]??{},{layer:Z,head:K}=d[y];return J(()=>{let se=B=>{v.current[y]=!0,w({[y]:B})};return b`<${cr} key=${y} side=${y} model=${n[y]} heads=${M} isBusy=${!M||!!V} chosen=${{layer:Z,head:K}}
        theme=${o} onChoose=${se} />`},[M,V,Z,K,o])}),O=y=>w({lambdas:y});return b`
    <header class="top">
      ${t.pairs?.length>1&&b`<nav class="pairs" aria-label="Models">
        <span class="quiet">Models</span>
        ${t.pairs.map(({name:y,address:M})=>b`<a key=${y} href=${M}
            aria-current=${location.pathname===M?"page":null}>${y}</a>`)}
      </nav>`}
      <h1>See the noise cancel</h1>
      <p class="lead">
        Each head of a Differential Transformer looks at the text twice, and takes the second look, times${" "}
        <i>λ</i>, away from the first: <span class="formula">A<sub>1</sub> − λA<sub>2</sub></span>.${" "}
        What both looks share is noise, and it cancels; what only the first one sees is left.${" "}
        <strong>Move λ</strong> and watch what the model attends to and what it would write next.
      </p>
      ${n.left.note&&b`<p class="note">${n.left.note}</p>`}
    </header>
    ${u&&b`<p class="refusal" role="alert">${u.message}</p>`}
    <main class="layout">
      <div class="controls">
        <${mr} model=${n.left} run=${A} place=${d.left} lambdas=${d.lambdas} onChange=${O} />
        <${_r} run=${A} right=${c.right} models=${n} theme=${o} />
        <${xr} data=${t} source=${e} view=${d} onChange=${w} onRefusal=${$} />
        <${Qt} models=${n} runs=${c} view=${d} source=${e} question=${k}
          onChange=${w} onRefusal=${$} />
      </div>
      <div class="pictures">
        <${hr} models=${n} runs=${c} maps=${f} view=${d} theme=${o} row=${R} hovered=${g}
          shared=${t.shared_vocabulary} onHover=${x} onChange=${w} live=${e.live} hasAddress=${e.hasAddress} />
        <div class="grids">${j}</div>
      </div>
    </main>
    <footer>
      <p>
        Differential attention: <a href="https://arxiv.org/abs/2410.05258" rel="noreferrer">arXiv 2410.05258</a>.${" "}
        ${a.map(y=>`${n[y].name}: ${n[y].label}, ${nn(n[y])}`).join("; ")}.
      </p>
    </footer>
  `}function nn({layers:t,heads:e,kv_heads:r}){let n=r!==e?` over ${r} key/value heads`:"";return`${t} ${t===1?"layer":"layers"} of ${e} ${e===1?"head":"heads"}${n}`}var on=(t,e)=>t.reduce((r,n)=>Math.abs(n.value-e)<Math.abs(r.value-e)?n:r),$r=t=>t.reduce((e,r)=>e+r,0),Ue=class{live=!1;hasAddress=!0;#e=new Map;constructor({recorded:e,models:r,examples:n}){this.recorded=e,this.models=r,[this.example]=n}shown(e){let r=Object.fromEntries(Object.entries(this.recorded).map(([o,{tokens:s,runs:i}])=>{let l=s.slice(s.length-i.length+1);return[o,l.slice(0,e.added[o].length)]})),{text:n,answer:a}=this.example;return{...e,text:n,answer:a,added:te(e.lambdas)?Y:{...Y,...r}}}async run({side:e,append:r=[],lambdas:n,answer:a,picture:o}){let{tokens:s,pieces:i,learned_lambdas:l,runs:d,moved:c}=this.recorded[e],h=s.length-d.length+1+r.length,f={tokens:s.slice(0,h),pieces:i.slice(0,h),learned_lambdas:l,...d[r.length]};if(n){let{all:p,layers:u,heads:$}=n,g=Object.entries({...p===null?{}:{all:p},...u,...$}),[x,m]=g[0];if(g.length>1||!(x in c))f.is_recorded=!1;else{let _=on(c[x],m);Object.assign(f,_.run,{recorded_at:_.value})}}return o&&(f.heads=this.#t(e,h,n,a,o)),f}async map({side:e,append:r=[],layer:n,head:a}){let{tokens:o,runs:s}=this.recorded[e];return ct(this.#r(e,n,a),o.length-s.length+1+r.length)}async next({side:e,append:r=[]}){let{tokens:n,runs:a}=this.recorded[e];return{token:n[n.length-a.length+1+r.length]}}#t(e,r,n,a,o){let{layers:s,heads:i,subtracts:l}=this.models[e],d=Math.min(o,r),c=new Int8Array(s*i*d*d),h={removed:l?[]:null,on_answer:a?[]:null,picture_size:d,pictures:c};for(let f=1,p=0;f<=s;f++){h.removed?.push([]),h.on_answer?.push([]);for(let u=1;u<=i;u++,p++){let $=ct(this.#r(e,f,u),r),g=Re($,n?ce(n,{layer:f,head:u}):null);if(l){let v=0;for(let w=0;w<g.length;w++)v+=Math.max(0,Math.min($.first[w],$.first[w]-g[w]));h.removed.at(-1).push(v/r)}if(a){let v=X(g,a.query).map(Math.abs);h.on_answer.at(-1).push($r(v.subarray(a.begin,a.end))/($r(v)||1))}let x=ye(r,g),_=dt(g,r,d).map(v=>Math.round(127*Math.sign(v)*Math.sqrt(Math.min(1,Math.abs(v)/x))));c.set(_,p*d*d)}}return h}#r(e,r,n){let a=`${e} ${r}.${n}`;return this.#e.has(a)||this.#e.set(a,de(je(this.recorded[e].maps[`${r}.${n}`]))),this.#e.get(a)}};var Be=class{live=!0;hasAddress=!1;#e=new Map;#t=0;constructor(e){this.model=e,e.on("msg:custom",({id:r,error:n,answer:a},o)=>{let s=this.#e.get(r);s&&(this.#e.delete(r),n?s.reject(new me(n)):s.resolve(o?.length?an(o[0]):a))})}#r(e,r){let n=`${this.#t++} ${Math.random()}`;return new Promise((a,o)=>{this.#e.set(n,{resolve:a,reject:o}),this.model.send({id:n,name:e,question:r})})}run=e=>this.#r("run",e);map=async(e,r)=>de(await this.#r("map",e),r);next=e=>this.#r("next",e);example=e=>this.#r("example",e)},an=t=>t instanceof ArrayBuffer?t:t.buffer.slice(t.byteOffset,t.byteOffset+t.byteLength);function wr(t,e,r){t.classList.add("explorer"),qe(b`<${br} data=${e} source=${r} root=${t} />`,t)}function sn({model:t,el:e}){return e.addEventListener("focusin",({target:r})=>r.dataset.lmSuppressShortcuts="true"),wr(e,t.get("described"),new Be(t)),()=>qe(null,e)}var xa={render:sn},vr=document.getElementById("explorer-data");if(vr){let t=JSON.parse(vr.textContent),e=t.mode==="recorded"?new Ue(t):new De;wr(document.getElementById("explorer"),t,e)}export{xa as default};
